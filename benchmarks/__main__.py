"""All benchmarks, one after the other: `make bench`."""

import sys

from benchmarks import crossing, driver_memory, handling, latency, poison, pubsub, small_runs, sqs, table_queue

for measure in (handling, crossing, poison, table_queue, sqs, pubsub, driver_memory, small_runs, latency):
    print(f"\n# {measure.__name__}\n", flush=True)
    sys.argv = [measure.__name__]
    measure.main()
