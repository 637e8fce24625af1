"""All benchmarks, one after the other: `make bench`."""

import sys

from benchmarks import crossing, driver_memory, handling, latency, poison, skip_locked, small_runs, table_queue

for measure in (handling, crossing, poison, table_queue, skip_locked, driver_memory, small_runs, latency):
    print(f"\n# {measure.__name__}\n", flush=True)
    sys.argv = [measure.__name__]
    measure.main()
