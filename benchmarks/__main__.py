"""Run the benchmarks of `make bench` one after the other."""

import sys

from benchmarks import (
    crossing,
    decoders,
    driver_memory,
    fairness,
    handling,
    json_payloads,
    kafka,
    kafka_run,
    kinesis,
    latency,
    poison,
    pubsub,
    rabbitmq,
    skip_locked,
    small_runs,
    sqs,
    table_queue,
)

IN_TURN = (
    handling,
    json_payloads,
    decoders,
    crossing,
    poison,
    fairness,
    table_queue,
    skip_locked,
    sqs,
    pubsub,
    kafka,
    kafka_run,
    kinesis,
    rabbitmq,
    driver_memory,
    small_runs,
    latency,
)

for measure in IN_TURN:
    print(f"\n# {measure.__name__}\n", flush=True)
    sys.argv = [measure.__name__]
    measure.main()
