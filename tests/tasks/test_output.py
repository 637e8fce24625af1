"""Output of callbacks: captured in all processes, bounded, and still written to the original stream."""
# ruff: noqa: T201

import io
import logging
import re
import sys
import threading
from typing import Any

import pytest

from pipeline_platform.lake.task_report import CallbackOutput
from pipeline_platform.tasks.callback_process.output import BYTES, LINES, Output, captured
from tests.fixtures.faults import fault
from tests.fixtures.obedient import Obedient
from tests.fixtures.small_lake import handled
from tests.tasks.test_batch import Obedient as Batching
from tests.tasks.test_batch import batched, staged


class Saying(Obedient):
    """Prints each message and each failure; `say ... kill` kills the process."""

    name = "saying"

    def __init__(self) -> None:
        print("made")

    def handle_message(self, message: Any, context: Any) -> Any:
        print(message.data.decode())
        fault(message.data.decode().removeprefix("say "))
        return super().handle_message(message, context)

    def handle_failed(self, messages: Any, context: Any) -> Any:
        print("failed", *(message.message_id for message in messages), file=sys.stderr)
        return messages


def text_of(output: Output) -> str:
    (kept,) = output.of("callbacks")
    return kept.text


def test_prints_of_callbacks_are_in_the_manifest_and_in_the_log(lake, capfd):
    (output,) = handled(lake, Saying, b"1", b"raise", b"2").totals.output
    assert (output.author, output.text, output.more) == ("callbacks of task 0", "made\n1\nraise\n2\nfailed m1\n", 0)
    out, err = capfd.readouterr()
    assert (out, err) == ("made\n1\nraise\n2\n", "failed m1\n")


def test_without_output_the_report_contains_none(lake):
    assert handled(lake, Obedient, b"1", b"raise").totals.output == []


def test_output_of_forks_is_captured_even_after_a_crash(lake):
    (output,) = handled(lake, Saying, b"1", b"say kill", b"3", b"raise", careful=True).totals.output
    said = output.text.splitlines()
    assert {"made", "1", "say kill", "3", "raise", "failed m3", "failed m1"} <= set(said)
    assert said.count("say kill") == 2, "with its neighbours, and alone"


def test_output_of_handle_batch_is_captured(lake):
    class Loud(Batching):
        name = "loud"

        def handle_batch(self, batcher, messages, batch_info, context):
            print(f"batch of {len(messages)}")
            return messages

    (output,) = batched(lake, staged("1", "2"), staged("3", key="l"), pipeline=Loud).totals.output

    assert output.text == "batch of 2\nbatch of 1\n"


def test_lines_beyond_the_bound_are_counted():
    with captured() as output:
        for number in range(LINES + 7):
            print(number)
    assert output.of("x") == [CallbackOutput("x", "".join(f"{number}\n" for number in range(LINES)), 7)]


@pytest.mark.parametrize("text", ["x" * 10 * 2**20, "\u20ac" * 10**6, "y" * 1_999])
def test_long_lines_are_cut_and_many_of_them_are_bounded(text):
    with captured() as output:
        for _ in range(50):
            print(text)
    (kept,) = output.of("x")
    assert len(kept.text.encode()) <= BYTES
    lines = kept.text.splitlines()
    assert {line.removesuffix("...") for line in lines} == {text[:2_000]}
    assert len(lines) + kept.more == 50


def test_lines_written_in_parts_are_captured_as_lines():
    with captured() as output:
        print("one", "two", sep="\n")
        print("begun, ", end="")
        print("ended")
        sys.stdout.writelines(["a\n", "b\n"])
        print("half \ud83d")
        print("flushed", end="", flush=True)
        print("left", end="")
    assert text_of(output).splitlines() == [
        "one", "two", "begun, ended", "a", "b", "half \\ud83d", "flushed", "left"
    ]  # fmt: skip


def test_lines_of_threads_do_not_mix():
    def speak(name: str) -> None:
        for number in range(10):
            for part in (name, " ", str(number), "\n"):
                sys.stdout.write(part)

    with captured() as output:
        threads = [threading.Thread(target=speak, args=(name,)) for name in ("anna", "bert", "cleo")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    expected = {f"{name} {number}" for name in ("anna", "bert", "cleo") for number in range(10)}
    assert set(text_of(output).splitlines()) == expected


def unconfigure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configure logging as in a worker, without pytest's handlers, which exist once the test has started."""
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)


def test_log_lines_without_configuration_are_captured_as_python_prints_them(monkeypatch):
    unconfigure(monkeypatch)
    log = logging.getLogger("saying.by.itself")
    with captured() as output:
        log.info("not shown")
        log.warning("number %d", 7)
    assert text_of(output) == "number 7\n"


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_log_lines_are_captured_in_the_configured_format(monkeypatch, when):
    unconfigure(monkeypatch)
    original, log = sys.stderr, logging.getLogger("saying.as.configured")
    if when == "before":
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    for _ in range(2):  # the second task of the worker
        with captured() as output:
            logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
            log.info("number %d", 7)
        assert text_of(output) == "INFO number 7\n"
    assert [handler.stream for handler in logging.root.handlers] == [original]


def test_streams_are_restored(monkeypatch):
    before = sys.stdout, sys.stderr
    with pytest.raises(ValueError, match="as told"), captured():
        raise ValueError("as told")
    assert (sys.stdout, sys.stderr) == before
    own = io.StringIO()
    with captured():
        monkeypatch.setattr(sys, "stdout", own)
    assert sys.stdout is own, "a stream set by a callback stays"


def test_a_callback_may_treat_its_streams_as_files():
    with captured() as output:
        assert sys.stdout.encoding
        assert not sys.stdout.isatty()
        sys.stdout.close()
        print("still heard")
    assert text_of(output) == "still heard\n"


def test_a_process_without_streams_captures_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with captured() as output:
        print("nowhere")
    assert output.of("x") == []


class Logging(Obedient):
    """Logs each message with the logger of its module."""

    name = "logging"

    def handle_message(self, message: Any, context: Any) -> Any:
        log = logging.getLogger(__name__)
        log.debug("not shown")
        log.info("has %s", message.data.decode())
        try:
            return super().handle_message(message, context)
        except ValueError:
            log.exception("as told")
            raise


@pytest.mark.parametrize("careful", [False, True], ids=["here", "in a callback process"])
def test_log_lines_of_a_pipeline_s_package_have_their_level_and_message(lake, monkeypatch, careful):
    unconfigure(monkeypatch)
    (output,) = handled(lake, Logging, b"1", b"raise", careful=careful).totals.output
    first, second, third, *traceback = output.text.splitlines()
    assert [first, second] == ["INFO message 'm0': has 1", "INFO message 'm1': has raise"]
    assert third == "ERROR message 'm1': as told"
    assert traceback
    assert all(line.startswith("  ") for line in traceback)
    assert logging.getLogger("tests").handlers == []


def test_log_lines_of_handle_batch_have_its_batcher_and_key(lake, monkeypatch):
    class Loud(Batching):
        name = "loud"

        def handle_batch(self, batcher, messages, batch_info, context):
            logging.getLogger(__name__).warning("late")
            return messages

    unconfigure(monkeypatch)
    (output,) = batched(lake, staged("1", key="k"), pipeline=Loud).totals.output
    assert re.fullmatch(r"WARNING batcher '\w+', batch key 'k': late\n", output.text)
