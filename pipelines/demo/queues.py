"""The demo's queue: made, filled once, looked at."""

from __future__ import annotations

import sqlite3
from contextlib import closing

from pipeline_platform.process import born
from pipelines.demo.departures import departures, payloads
from pipelines.demo.place import Place, Progress
from pipelines.local_servers import sqs
from resources.table_queue import TableQueue

_QUEUE = "flights"


def table_queue(place: Place) -> TableQueue:
    """The table queue, as `definitions` has it."""
    return TableQueue(name="flights_queue", url=f"sqlite:///{place.queue}", created_column="created_at")


def start_server(place: Place, progress: Progress) -> Progress:
    """Start the SQS server with an empty queue, and keep where it is: it may outlive this process."""
    server = sqs.start(place.servers, detached=True)
    try:
        url = sqs.create_queue(server, _QUEUE)
        known = (server.url, server.pid, born(server.pid) or "")
        progress = progress.model_copy(update={"queue_url": url, "server": known})
        place.keep(progress)
    except BaseException:  # Ctrl-C, too: nobody would know of it
        sqs.stop(server)
        raise
    return progress


def server_lives(progress: Progress) -> bool:
    """Whether the SQS server that holds the queue is still that process: it keeps messages in memory alone."""
    return progress.server is not None and born(progress.server[1]) == progress.server[2]


def stop_server(progress: Progress | None) -> None:
    """End the SQS server, if it is still that process."""
    if progress and progress.server and server_lives(progress):
        sqs.stop(sqs.Server(progress.server[0], progress.server[1]))


def fill(place: Place, progress: Progress) -> int:
    """Put the flights into the queue: a table takes all or none, an SQS queue ten by ten. Return how many."""
    messages = payloads(departures(progress.flights))
    if progress.queue_url:
        return sqs.fill(progress.queue_url, messages)
    queue = table_queue(place)
    queue.create()
    return queue.enqueue(messages)


def at_the_queue(place: Place, progress: Progress) -> tuple[int, int]:
    """How many messages wait, and how many are there at all, the leased ones included."""
    if progress.queue_url and progress.server:
        client = sqs.client(progress.server[0])
        told = client.get_queue_attributes(QueueUrl=progress.queue_url, AttributeNames=["All"])["Attributes"]
        waiting = int(told["ApproximateNumberOfMessages"])
        return waiting, waiting + int(told["ApproximateNumberOfMessagesNotVisible"])
    if not place.queue.exists():
        return 0, 0
    with closing(sqlite3.connect(f"file:{place.queue}?mode=ro", uri=True, timeout=30)) as database:
        there = int(database.execute("SELECT count(*) FROM messages").fetchone()[0])
    return table_queue(place).backlog().messages or 0, there
