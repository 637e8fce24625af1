"""`trace` of one message in a lake with outcomes of four days in 96 files, with random ids.

Run it as `python -m benchmarks.trace [--history N] [--rounds N]`.
"""

import statistics
import tempfile
import time
import uuid

from benchmarks.events import LongKnown
from benchmarks.options import options
from benchmarks.sqs import write_history
from pipeline_platform.cli.lake.deliveries import deliveries_of
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.run.flow import looked_at


def main() -> None:
    """Run the benchmark and print the result."""
    given = options(__doc__, history=10_000_000, rounds=5)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        flow = looked_at(LongKnown, Lake(root=f"{folder}/lake"), ControlStore(f"sqlite:///{folder}/control.sqlite"))
        write_history(flow, given.history, in_order=False)
        took = []
        for number in range(given.rounds):
            started = time.perf_counter()
            (found,) = deliveries_of(flow, str(uuid.uuid5(uuid.NAMESPACE_OID, f"40:{number}")))
            took.append(time.perf_counter() - started)
            assert found.outcome == "handled"
    spread = f"{min(took):.2f} to {max(took):.2f}"
    print(f"trace among {given.history:,} outcomes: {statistics.median(took):.2f} s ({spread})")


if __name__ == "__main__":
    main()
