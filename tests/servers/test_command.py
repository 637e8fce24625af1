"""`python -m servers`: its output, and a server that it starts and stops."""

import signal
import subprocess
import sys
from typing import Any

import dagster as dg
import pytest

from pipeline_platform import Source
from pipeline_platform.connectors.sqs import SqsSource
from servers import sqs
from servers.__main__ import USES, how_to_use, main
from tests.fixtures.keeper import PROJECT
from tests.fixtures.servers import ready
from tests.servers.test_servers import descendants, remaining


def source_of(lines: list[str]) -> Source:
    """Return the source that the printed lines for `resources/` build."""
    names: dict[str, Any] = {}
    exec("\n".join(line.strip() for line in lines[lines.index("For resources/trial.py:") + 1 : -1]), names)
    with dg.build_resources({"trial": names["trial"]}) as resources:
        source = resources.trial
    assert isinstance(source, Source)
    return source


@pytest.mark.parametrize("name", USES)
def test_the_line_for_definitions_builds_a_source_at_that_address(name):
    scheme = {"postgres": "postgresql://", "rabbitmq": "amqp://", "kinesis": "http://", "sqs": "http://"}.get(name, "")
    source = source_of(list(how_to_use(USES[name], f"{scheme}127.0.0.1:5")))
    assert "127.0.0.1:5" in str(source.model_dump())


def test_without_a_name_the_command_prints_its_usage(capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("install", *USES))


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_it_starts_a_server_that_ends_with_a_signal_and_leaves_nothing(ending):
    before, command = descendants(), [sys.executable, "-m", "servers", ready(sqs)]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said: list[str] = []
        for line in process.stdout:
            said.append(line.rstrip())
            if line.startswith("Create first"):
                break
        started = descendants() - before
        source = source_of(said)
        assert isinstance(source, SqsSource)
        assert source.queue_url == sqs.create_queue(source.endpoint_url or "", "trial")

        process.send_signal(ending)
        assert process.wait(60) == 0
    assert not remaining(started)
