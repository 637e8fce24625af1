"""Notifications of a bucket about new files: from S3 through SQS, from Google Cloud Storage through Pub/Sub."""

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import unquote_plus

from pipeline_platform.connectors.files.catalog import Found
from pipeline_platform.connectors.pubsub import PubsubSource
from pipeline_platform.connectors.sqs import SqsSource
from pipeline_platform.lake import object_stores
from pipeline_platform.model.safe_text import redacted
from pipeline_platform.source.calls import CalledSource

logger = logging.getLogger(__name__)

_LEASE_S = 120
"""Lease of notifications: a notification that a process received before its crash is redelivered after this time."""
_PULL_S = 1.0
"""Seconds that a pull from Pub/Sub waits for a notification. It is short, because each take ends with empty pulls."""
_THREADS = 16
"""Concurrent requests for size and time of files."""
_CREATED = re.compile(r"(s3:)?ObjectCreated:.*|OBJECT_FINALIZE")


def queue_of(address: str, source: str) -> CalledSource:
    """Return the queue of notifications: from SQS for a URL, else from Pub/Sub."""
    name = f"{source} notifications"
    if "://" in address:
        return SqsSource(name=name, queue_url=address, visibility_timeout=_LEASE_S)
    return PubsubSource(name=name, subscription=address, ack_deadline_s=_LEASE_S, pull_timeout_s=_PULL_S)


class Notifications:
    """Notifications of the bucket of a root, in a queue.

    A notification only names a file: it may be delivered twice, late or out of order. It is removed once its files are
    in the catalog, which contains each version of a file once.

    Args:
        queue: Queue of the notifications.
        root: URL of the object store.
        find: Function that returns the current version of a file by its path below the root; None if the file does not
            exist or is left out.
    """

    def __init__(self, queue: CalledSource, root: str, find: Callable[[str], Found | None]) -> None:
        self.queue = queue
        self._bucket, _, folder = object_stores.path_of(root).partition("/")
        self._prefix = f"{folder}/" if folder else ""
        self._find = find

    def take(self, most: int, add: Callable[[Iterable[Found]], object]) -> None:
        """Pass the files of up to `most` notifications to `add`, then remove these notifications.

        Any other message stays in the queue, and the log contains an error.

        Raises:
            SourceError: The queue or the object store is unavailable. The notifications are redelivered.
        """
        for share in self.queue.plan(most, 1, self.queue.name):
            for batch in self.queue.read(share, self.queue.name):
                self._take(batch.select(["message_id", "data", "metadata", "ack_ref", "ack_id"]).to_pylist(), add)

    def close(self) -> None:
        """Close the queue."""
        self.queue.close()

    def _take(self, messages: Sequence[Mapping[str, Any]], add: Callable[[Iterable[Found]], object]) -> None:
        with ThreadPoolExecutor(_THREADS) as pool:
            answers = list(pool.map(self._files, messages))
        errors = [answer for answer in answers if isinstance(answer, OSError)]
        if errors and len(errors) == len(answers):
            raise self.queue.error(f"files cannot be looked up: {errors[0]}", away=True)
        add(file for answer in answers if isinstance(answer, list) for file in answer)
        taken = []
        for message, answer in zip(messages, answers, strict=True):
            if isinstance(answer, list):
                taken.append(message["ack_id"])
            else:
                text = "%s: message %s stays in the queue: %s"
                logger.error(text, self.queue.name, message["message_id"], redacted(str(answer)))
        self.queue.ack(messages[0]["ack_ref"], taken)

    def _files(self, message: Mapping[str, Any]) -> list[Found] | Exception:
        """Return the files that a message names, or the reason why it stays in the queue."""
        try:
            named = _created(message["data"], json.loads(message["metadata"] or "{}").get("attributes", {}))
            if other := {bucket for bucket, _ in named} - {self._bucket}:
                raise ValueError(f"it names bucket {min(other)!r:.100}, and root bucket {self._bucket!r}")
            paths = dict.fromkeys(key.removeprefix(self._prefix) for _, key in named if key.startswith(self._prefix))
            return [file for path in paths if (file := self._find(path))]
        except Exception as error:  # of any malformed message: it must not delay the other messages
            return error


def _created(data: bytes, attributes: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return bucket and key of each object that a notification reports as created; raise `ValueError` for another."""
    try:
        if "objectId" in attributes:
            events = [(attributes["eventType"], attributes["bucketId"], attributes["objectId"])]
        else:
            event = json.loads(data)
            if event.get("Type") == "Notification":  # S3 sent it to an SNS topic
                event = json.loads(event["Message"])
            if event.get("Event") == "s3:TestEvent":
                return []
            of = [(record["eventName"], record["s3"]) for record in event["Records"]]
            events = [(name, str(s3["bucket"]["name"]), unquote_plus(s3["object"]["key"])) for name, s3 in of]
        return [(bucket, key) for name, bucket, key in events if _CREATED.fullmatch(name)]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError("it is not a notification of S3 or Google Cloud Storage") from None
