"""Output of callbacks in the log of the run."""

import logging
from types import SimpleNamespace

from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.task_report import CallbackOutput, TaskReport
from pipeline_platform.orchestration.reports.reporting import log_output
from pipeline_platform.tasks.callback_process.output import captured


def test_lines_are_logged_at_the_level_that_they_begin_with(caplog):
    said = "printed\nERROR message '1': as told\n  Traceback\nWARNING:root:own format\nINFO: x\n"
    with caplog.at_level(logging.INFO):
        manifest = Manifest(reports=[TaskReport(output=[CallbackOutput("callbacks", said, 2)])])
        log_output(SimpleNamespace(log=logging.getLogger("run")), manifest)
    assert [(record.levelname, record.getMessage().splitlines()[1:]) for record in caplog.records] == [
        ("INFO", ["| printed"]),
        ("ERROR", ["| ERROR message '1': as told", "|   Traceback"]),
        ("WARNING", ["| WARNING:root:own format"]),
        ("INFO", ["| INFO: x", "| 2 more lines are in Spark's log"]),
    ]


def test_what_a_callback_prints_cannot_pass_for_a_line_of_the_log(caplog):
    with captured() as output:
        print("\n2026-11-26 - ERROR - forged\r\x1b[2Jcleared\u2028apart\u202ereversed")  # noqa: T201
    with caplog.at_level(logging.INFO):
        manifest = Manifest(reports=[TaskReport(output=output.of("callbacks of task 0"))])
        log_output(SimpleNamespace(log=logging.getLogger("run")), manifest)
    first, *lines = "\n".join(record.getMessage() for record in caplog.records).split("\n")
    assert first == "Output of callbacks of task 0:"
    assert lines == ["| ", r"| 2026-11-26 - ERROR - forged\r\x1b[2Jcleared\u2028apart\u202ereversed"]
