"""The layout of `deploy/` on five hosts: with any crash or network fault, each message is in the table once."""

import logging
import os
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import polars as pl
import psycopg
import pytest

from tests.hosts.layout import ADDRESSES, SERVERS, Layout, await_, missing

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1_800)]

DOWN_S = 90
ALL = 200_000
FAULTS = [*(("link", host) for host in ADDRESSES), *(("server", server) for server in SERVERS), ("gone", "e")]
EACH = int(os.environ.get("HOSTS_MESSAGES", -(-ALL // len(FAULTS))))
"""Messages that are on their way while one thing fails."""
WITHIN_S = 600


class Counting:
    """Counts of messages without the platform: by PostgreSQL's socket, and by the files of the S3 server."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self.sent = layout, 0

    def send(self, messages: int) -> None:
        with psycopg.connect(self._layout.at_the_database) as connection:
            rows = "SELECT convert_to(json_build_object('n', n)::text, 'UTF8') FROM generate_series(%s::int, %s) AS n"
            connection.execute(f"INSERT INTO messages (data) {rows}", (self.sent, self.sent + messages - 1))
        self.sent += messages

    def waiting(self) -> int:
        with psycopg.connect(self._layout.at_the_database) as connection:
            row = connection.execute("SELECT count(*) FROM messages").fetchone()
        return row[0] if row else 0

    def stored(self) -> Counter[int]:
        tables = list(self._layout.objects.glob("lake/**/numbers/_delta_log"))
        return Counter(pl.read_delta(str(tables[0].parent))["n"]) if tables else Counter()

    def handled(self) -> int:
        with suppress(Exception):  # a commit may be under way
            return self.stored().total()
        return 0


@pytest.fixture(scope="module")
def layout():
    if why := missing():
        pytest.skip(why)
    # Outside pytest's folder: another pytest removes the access of PostgreSQL's user.
    with tempfile.TemporaryDirectory(prefix="hosts-", ignore_cleanup_errors=True) as folder:
        layout = Layout(Path(folder))
        try:
            layout.open()
            yield layout
        finally:
            layout.close()


@pytest.fixture(scope="module")
def counting(layout):
    return Counting(layout)


def test_tasks_of_a_host_that_is_cut_off_are_named_while_spark_waits_for_it(layout, counting):
    """Spark's default timeout is two minutes; with the deployed settings its tasks start on another host earlier."""
    layout.restart_spark(150)
    before = counting.handled()
    counting.send(EACH)
    await_(lambda: counting.handled() > before, WITHIN_S)
    layout.link("e", "down")

    def status() -> str:
        return " ".join(
            layout.run("a", "sh", "-c", "pipeline-platform status || true").split()
        )  # its lines are broken for a terminal

    await_(lambda: f"on host {ADDRESSES['e']}" in status(), 120)
    layout.link("e", "up")
    await_(lambda: counting.handled() >= counting.sent and not counting.waiting(), WITHIN_S)
    assert counting.stored() == Counter(range(counting.sent))
    layout.restart_spark(30)


@pytest.mark.parametrize(("kind", "which"), [("none", "none"), *FAULTS])
def test_each_message_once(kind, which, layout, counting):
    before = counting.handled()
    counting.send(EACH)
    began = time.monotonic()
    try:
        await_(lambda: counting.handled() > before, WITHIN_S)
        assert counting.handled() < counting.sent, "the fault came after the work: raise HOSTS_MESSAGES"
        if kind == "link":
            layout.link(which, "down")
            time.sleep(DOWN_S)
            layout.link(which, "up")
        elif kind == "server":
            layout.kill(which)
            layout.start(which)
        elif kind == "gone":
            layout.link(which, "down")
            layout.kill(f"worker-{which}")
        fixed = time.monotonic()
        await_(lambda: counting.handled() >= counting.sent and not counting.waiting(), WITHIN_S)
    except BaseException as error:
        error.add_note(layout.logs())
        raise
    took = f"{fixed - began:.0f} s to the fix, {time.monotonic() - fixed:.0f} s after it"
    logging.getLogger(__name__).warning("%s %s: %d messages, %s", kind, which, EACH, took)
    assert counting.stored() == Counter(range(counting.sent))
