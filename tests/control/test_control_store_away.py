"""A damaged or locked control store: sensor and schedules skip with a reason, and recover."""

import sqlite3
import time
from contextlib import closing

from tests.fixtures.sensor import Place
from tests.orchestration.test_schedules import scheduled


def damage(place: Place) -> None:
    """Overwrite the control store."""
    place.control.pause("asked", "so that it is there")
    place.control.close()
    for end in ("-wal", "-shm"):
        (place.folder / f"control.sqlite{end}").unlink(missing_ok=True)
    file = place.folder / "control.sqlite"
    file.write_bytes(b"not a database, for once" * 100)


def test_a_damaged_store_is_a_reason_that_names_the_file_until_it_is_removed(place):
    place.enqueue(100)
    damage(place)
    said = place.skips()
    assert str(place.folder / "control.sqlite") in said
    assert "remove it with the -wal and -shm files beside it" in said
    assert "limits set at run time, pauses, claims and the history are lost" in said

    told = scheduled("clocked_pull_schedule", place)
    assert not told.run_requests
    assert str(place.folder / "control.sqlite") in str(told.skip_message)

    (place.folder / "control.sqlite").unlink()
    assert place.asked() == [100]


def test_a_look_waits_for_no_writer(place):
    place.enqueue(100)
    place.control.resume("asked")
    place.control.close()  # as after each tick
    with closing(sqlite3.connect(place.folder / "control.sqlite", isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        assert place.asked() == [100]
        assert time.monotonic() - began < 20


def test_a_store_that_another_keeps_to_itself_is_a_reason(place, monkeypatch):
    place.enqueue(100)
    place.control.resume("asked")
    place.control.close()
    monkeypatch.setattr("pipeline_platform.sql.database.BUSY_S", 0.5)
    with closing(sqlite3.connect(place.folder / "control.sqlite", isolation_level=None)) as owner:
        owner.execute("PRAGMA locking_mode = EXCLUSIVE")
        owner.execute("BEGIN EXCLUSIVE")
        said = place.skips()
    assert "database is locked" in said
    assert f"Another process has locked {place.folder / 'control.sqlite'}" in said
    assert place.asked() == [100]
