"""Files that cannot be read while the storage answers wait, and do not stop the run."""

import math
from typing import Any

import pytest

from pipeline_platform.connectors.files import FileSource
from pipeline_platform.source.contract import SourceAwayError
from pipeline_platform.sql.database import Database
from tests.fixtures.files import deliveries, lines, root, source

__all__ = ["root", "source"]


class Failing:
    """A file system that cannot open `unreadable` for some times, or that answers nothing."""

    def __init__(self, files: Any, unreadable: str, times: float = math.inf, *, away: bool = False) -> None:
        self._files, self._unreadable, self._times, self._away = files, unreadable, times, away

    def get_file_info(self, path: Any) -> Any:
        if self._away:
            raise OSError("no answer")
        return self._files.get_file_info(path)

    def open_input_file(self, path: str) -> Any:
        if path == self._unreadable and self._times > 0:
            self._times -= 1
            raise PermissionError(f"Failed to open {path}")
        return self._files.open_input_file(path)


def read_files(source: FileSource) -> list[str]:
    """Read and finish a receive; return the file of each row."""
    read = [row["message_id"].partition("@")[0] for row in deliveries(source)]
    source.finish("r", list)
    return read


def test_an_unreadable_file_waits_and_does_not_stop_other_files(source, root, monkeypatch, caplog):
    for name, number in ("a.jsonl", 1), ("b.jsonl", 2):
        (root / name).write_bytes(lines(number))
    files = source._files
    monkeypatch.setitem(source.__dict__, "_files", Failing(files, "a.jsonl"))

    assert read_files(source) == ["b.jsonl"]
    assert "a.jsonl cannot be read, trying again in 600 s: Failed to open a.jsonl. Grant read access" in caplog.text
    assert source.backlog().messages == 0, "it is tried again later"

    monkeypatch.setitem(source.__dict__, "_files", files)
    now = Database.now
    monkeypatch.setattr(Database, "now", lambda *of: now(*of) + 601 * 1_000_000)
    assert read_files(source) == ["a.jsonl"]


@pytest.mark.parametrize("failing", [{"away": True}, {"times": 1}], ids=["no answer", "a short outage"])
def test_a_storage_that_does_not_answer_stops_the_run(source, root, monkeypatch, failing):
    (root / "a.jsonl").write_bytes(lines(1))
    (share,) = source.plan(1, 1, "r")
    monkeypatch.setitem(source.__dict__, "_files", Failing(source._files, "a.jsonl", **failing))

    with pytest.raises(SourceAwayError, match=r"a\.jsonl"):
        list(source.read(share, "r"))
