"""Many pipelines in one deployment: the size of Dagster's description of them, and the time to load them.

Run it as `python -m benchmarks.pipelines [--pipelines N ...]`. Each number of pipelines is loaded in a new process. The
web server and the daemon get the description, a repository snapshot, from the code server.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NUMBERS = (1, 10, 30, 60, 120)


def load(number: int, folder: Path) -> dict[str, float]:
    """Load a deployment; return the bytes of its description, and the seconds of processor time."""
    import dagster as dg
    from dagster._core.remote_representation.external_data import RepositorySnap  # what a code server sends

    from benchmarks import events
    from pipeline_platform import Producer
    from pipeline_platform.connectors.table_queue import TableQueue
    from pipeline_platform.orchestration.deployment import platform_definitions
    from pipeline_platform.orchestration.resources.lake_resources import ControlResource, LakeResource
    from pipeline_platform.orchestration.resources.spark_resource import SparkResource

    names = [f"events_{index}" for index in range(number)]
    options = {"__module__": events.__name__}
    classes = [
        type(name, (events.Events,), {"name": name, "producer": Producer(source=f"{name}_queue"), **options})
        for name in names
    ]
    for each in classes:  # as if they were written there
        setattr(events, each.__name__, each)
    sources = {f"{name}_queue": TableQueue(name=f"{name}_queue", url=f"sqlite:///{folder}/{name}") for name in names}
    resources = {
        "lake": LakeResource(root=f"{folder}/lake"),
        "control": ControlResource(url=f"sqlite:///{folder}/control.sqlite"),
        "spark": SparkResource(packages=["benchmarks"]),
    }
    started = time.process_time()
    repository = platform_definitions(classes, resources, sources=sources).get_repository_def()
    repository.load_all_definitions()
    loaded = time.process_time()
    snapshot = RepositorySnap.from_def(repository)
    size = len(dg.serialize_value(snapshot))
    return {"bytes": size, "load": loaded - started, "describe": time.process_time() - loaded}


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipelines", type=int, nargs="+", default=NUMBERS)
    parser.add_argument("--load", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(load(given.load, Path(folder))))
        return
    for number in given.pipelines:
        command = [sys.executable, "-m", "benchmarks.pipelines", "--load", str(number)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        took = json.loads(done.stdout.splitlines()[-1])
        each = f"{took['bytes'] / number / 1_000:,.0f} kB per pipeline"
        print(
            f"| {number} | {took['bytes'] / 1e6:.2f} MB ({each}) | {took['load']:.1f} s | {took['describe']:.1f} s |",
            flush=True,
        )


if __name__ == "__main__":
    main()
