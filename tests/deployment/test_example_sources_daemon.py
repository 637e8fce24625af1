"""The documents' example sources under the real daemon: runs are killed as they handle, and after they publish."""

import os
import shutil
import signal
import sys
from contextlib import suppress

import dagster as dg
import polars as pl
import pytest

from tests.deployment.test_daemon import deployment, done, run_at_work
from tests.fixtures.location import lines, write_location
from tests.fixtures.source_rows import nats, redis


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_each_message_is_stored_once_although_runs_are_killed(tmp_path, warm_spark, request):
    sources = {kind.__name__: kind(request, 4)[0]() for kind in (redis, nats)}
    files, sent = [], {}
    for name, source in sources.items():
        handling = lines(name, 'source="contract", idle_timeout=timedelta(seconds=3)')
        location = write_location(tmp_path, name, warm_spark.folder, handling, "Lines", source)
        module = sys.modules[type(source).__module__]
        shutil.copy(str(module.__file__), location.parent)  # as a user does
        location.write_text(location.read_text().replace(module.__name__, module.__name__.rpartition(".")[2]))
        files.append(location)
        gates = [tmp_path / f"first {name}", tmp_path / f"second {name}"]
        sent[name] = [f"wait for {gate}" for gate in gates] + [str(number) for number in range(100)]

    with deployment(tmp_path, warm_spark.folder, files=files) as deployed:

        def stored(name: str) -> list[str]:
            table = tmp_path / "lake" / name / "lake"
            return sorted(pl.read_delta(str(table))["text"]) if table.exists() else []

        for name, source in sources.items():
            source.send([text.encode() for text in sent[name]])
        for name in sources:
            os.kill(run_at_work(deployed, name)[1], signal.SIGKILL)
            (tmp_path / f"first {name}").touch()
        for name in sources:
            process = run_at_work(deployed, name)[1]
            (tmp_path / f"second {name}").touch()
            deployed.until("rows are published", lambda name=name: stored(name))
            with suppress(ProcessLookupError):  # it may have ended
                os.kill(process, signal.SIGKILL)

        for name, source in sources.items():
            deployed.until("all messages are stored", lambda name=name: stored(name) == sorted(sent[name]))
            deployed.until("the queue is empty", lambda source=source: source.backlog().messages == 0)
        deployed.until("the runs have ended", lambda: done(deployed.instance))
        for name, source in sources.items():
            assert stored(name) == sorted(sent[name])
            runs = deployed.instance.get_runs(dg.RunsFilter(job_name=f"{name}_pull"))
            assert {run.status.value for run in runs} >= {"SUCCESS", "FAILURE"}
            source.close()
