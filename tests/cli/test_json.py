"""The JSON of each command: it is valid by the class in the reference, and each field has a description."""

import json
from datetime import UTC, datetime

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from pipeline_platform.cli.main import app
from pipeline_platform.cli.output import Output
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from tests.fixtures.json_reference import OUTPUTS, _kinds
from tests.fixtures.pipelines_under_test import Coasts
from tests.fixtures.small_lake import WINDOW, Keeping, Memory, Run


def commands(group: TyperGroup, path: str = "") -> dict[str, object]:
    found = {}
    for name, command in group.commands.items():
        here = f"{path} {name}".strip()
        found |= commands(command, here) if isinstance(command, TyperGroup) else {here: command}
    return found


def test_each_command_with_json_is_in_the_reference():
    with_json = {
        name
        for name, command in commands(get_command(app)).items()
        if any("--json" in parameter.opts for parameter in command.params)
    }
    assert with_json == set(OUTPUTS)


def test_each_field_has_a_description():
    kinds = {kind for output in OUTPUTS.values() for kind in _kinds(output)}
    assert not [
        f"{kind.__name__}.{name}"
        for kind in kinds
        for name, field in kind.model_fields.items()
        if not field.description
    ]


@pytest.fixture
def cli(beside, tmp_path, control, monkeypatch):
    """A deployment with a failure, an unfinished receive, limits and a lease."""
    queue = TableQueue(name="queue", url=f"sqlite:///{tmp_path}/queue.sqlite")
    queue.create()
    queue.enqueue([b"1", b"2"])
    queue.plan(1, 1, "somebody")
    call = beside(Keeping, Coasts, memory=Memory(), queue=queue, beside_queue=queue)
    tables = Tables(Lake(root=str(tmp_path / "lake")), Keeping)
    Run(tables, Memory(deliveries_=(("1", b"one"), ("2", b"fail"))), "first").finish()
    Run(tables, Memory(deliveries_=(("3", b"three"),)), "second").work().decide()
    call("limit", "keeping", "--allowed", "5", "--interval", "2")
    monkeypatch.setenv("PIPELINE_PLATFORM_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.txt").write_text("one\ntwo\n")
    return call


ARGUMENTS = {
    "trace": ["keeping", "1"],
    "pause": ["keeping", "--reason", "moves"],
    "resume": ["keeping"],
    "drain": ["keeping"],
    "limit": ["keeping"],
    "scale": ["keeping", "--max-runs", "2"],
    "repair": ["keeping"],
    "failures list": ["keeping"],
    "failures show": ["keeping", "2"],
    "failures retry": ["keeping", "--all", "--dry-run", "--ignore-pause"],
    "failures close": ["keeping", "--all", "--why", "sold out"],
    "failures reopen": ["keeping", "--all"],
    "push": ["coasts", "--producer", "east", "--file", "lines.txt"],
    "erase": ["keeping", "--message-id", "1", "--yes", "--timeout", "0"],
    "pull": ["keeping", "--dry-run", "--ignore-pause"],
    "replay": ["keeping", "--window", WINDOW, "--dry-run", "--ignore-pause"],
    "table-queue show": ["queue"],
}


def test_each_command_prints_valid_json(cli):
    for command, output in OUTPUTS.items():
        if command != "doctor":  # it loads the deployment itself
            answer = cli(*command.split(), *ARGUMENTS.get(command, []), "--json")
            assert answer.stdout.count("\n") == 1, answer.stdout
            line = answer.stdout
            data = json.loads(line)
            assert output.model_validate_json(line).model_dump(mode="json", exclude_unset=True) == data, command


def test_times_and_numbers_that_json_lacks(capsys):
    class Anything(Output):
        at: datetime
        rows: list[dict[str, object]]

    from pipeline_platform.cli.output import print_json

    at = datetime(2026, 11, 20, 10, 3, tzinfo=UTC)
    print_json(Anything(at=at, rows=[{"nan": float("nan"), "bytes": b"\xff", "text": "a\x1b[2Jb", "at": at}]))
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert json.loads(said) == {
        "at": "2026-11-20T10:03:00Z",
        "rows": [{"nan": None, "bytes": "_w==", "text": "a\x1b[2Jb", "at": "2026-11-20T10:03:00Z"}],
    }
