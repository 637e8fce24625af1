"""Rows of files as messages: JSON Lines, CSV and Parquet in a folder or an object store."""

import fnmatch
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cached_property
from typing import ClassVar, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
from pydantic import Field, ValidationError, model_validator

from pipeline_platform.connectors.files import rows
from pipeline_platform.connectors.files.catalog import Catalog, Found, divided
from pipeline_platform.connectors.files.notifications import Notifications, queue_of
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.retry import Backoff
from pipeline_platform.model.safe_text import redacted
from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.clients import per_process
from pipeline_platform.source.contract import LeasedIds, Share, SourceAwayError, SourceError
from pipeline_platform.source.leased import LeaseOptions
from pipeline_platform.source.pauses import PAUSES
from pipeline_platform.source.positioned import WholeReceiveSource
from pipeline_platform.sql.database import Database, DatabaseUrl, parse_url

logger = logging.getLogger(__name__)

_SETTLE_S = 2.0
_MISSING_S = 600
"""Seconds until a file that is missing or unreadable is tried again."""
MOST_FILES = 10_000
"""Maximum number of files of one receive: their names are part of its record."""
_MOST_NOTIFICATIONS = 1_000
"""Maximum number of notifications that an estimate of the backlog takes, because it must be quick."""
_QUEUE = re.compile(r"https?://[\w.-]+(:\d+)?/[^@?#\s]+|projects/[^/]+/subscriptions/[^/]+")
_LIST_EVERY_S, _LIST_RARELY_S = 10.0, 86_400.0
"""Default seconds between two listings, without and with notifications."""


class FileSource(LeaseOptions, WholeReceiveSource):
    """Files under a root, each row of which is a message. A file is read once a listing or a notification names it.

    A receive leases whole files, and reads each in one task. Its rows have the ids `<path>@<version>#<line>`, so a file
    that is read again after a crash yields duplicates only. A file is done once all its rows are decided.

    The source changes, moves and deletes no file. Write a file elsewhere and move it to the root: a file that grows is
    read again as a new version.
    """

    reads_again: ClassVar[bool] = True

    root: str = Field(description="Folder, or URL of an object store, as of the lake: s3://bucket/prefix.")
    pattern: str = Field("*", description="Pattern of the path below root, such as `2026/*.jsonl.gz`; * matches / too.")
    format: rows.Format | None = Field(
        None, description="json_lines, csv or parquet; by default according to the suffix of each file."
    )
    storage_options: dict[str, str] = Field(
        default_factory=dict, repr=False, description="Options of the object store, as of the lake."
    )
    catalog: DatabaseUrl = Field(
        repr=False,
        description="SQLAlchemy URL of a database for the list of files: sqlite:///<path> or "
        "postgresql+psycopg://user:password@host/database.",
    )
    table: str = Field("files", pattern=r"^\w{1,50}$", description="Table of the catalog, one per source.")
    notifications: str | None = Field(
        None,
        description="Queue of the bucket's notifications, which name new files: URL of an SQS queue, or "
        "projects/<project>/subscriptions/<name> of Pub/Sub. Without it, files are found by listing root.",
    )
    list_root: bool = Field(
        True,
        description="Whether root is listed; false needs notifications. list_every_s and settle_s then have no effect, "
        "and all files count as redelivered.",
    )
    list_every_s: float | None = Field(
        None,
        ge=0,
        description="Seconds between two listings of root, over all processes. Default: 10, or 86,400 with "
        "notifications.",
    )
    settle_s: float | None = Field(
        None,
        ge=0,
        description="Minimum time in seconds since the last change of a file that a listing finds; files that "
        "notifications name are complete. Default: 2 in a folder, where a file may grow, and 0 in an object store.",
    )
    row_bytes: int = Field(
        200,
        ge=1,
        description="Expected bytes of a row as stored in a file, after compression. Used until the first file is "
        "done, to estimate the backlog.",
    )
    max_row_bytes: int = Field(
        16 * 2**20, ge=1, description="Maximum bytes of a row; a longer row fails as a truncated message."
    )

    @model_validator(mode="after")
    def _is_a_root(self) -> Self:
        try:
            self.__dict__["root"] = Lake(root=self.root, storage_options=self.storage_options).root.rstrip("/")
        except ValidationError as error:  # its text, without the value, which may contain credentials
            raise ValueError("; ".join(str(each["ctx"]["error"]) for each in error.errors())) from None
        return self

    @model_validator(mode="after")
    def _finds_files(self) -> Self:
        if self.notifications is None:
            if not self.list_root:
                raise ValueError("list_root is False, and notifications is not set. Set it, or list_root to True.")
        elif "://" not in self.root:
            raise ValueError(f"notifications must not be set for a folder, got root {self.root}. Remove it.")
        elif not _QUEUE.fullmatch(self.notifications):
            raise ValueError(
                "notifications must be the URL of an SQS queue or projects/<project>/subscriptions/<name>, got "
                f"{redacted(self.notifications)!r}. Correct it."
            )
        return self

    @property
    def places(self) -> frozenset[str]:
        """The root with the pattern, and the table of the catalog."""
        catalog = parse_url(self.catalog).set(query={}, username=None, password=None)
        queue = self._notifications.queue.places if self._notifications else frozenset()
        return queue | {f"files {self.root}/{self.pattern}", f"table {self.table} of {catalog}"}

    @property
    def poll_pauses(self) -> Backoff:  # type: ignore[override]
        """The pauses of the queue of notifications, if there is one."""
        return self._notifications.queue.poll_pauses if self._notifications else PAUSES

    def backlog(self) -> Backlog:
        """Estimate the rows of the files that wait, by their size."""
        self._list_if_due()
        notified = None if self._notifications else 0
        if self._notifications:
            with self._unless_files_wait():
                if notified := self._notifications.queue.backlog().messages:
                    self._notifications.take(_MOST_NOTIFICATIONS, self._catalog.add)
        messages, oldest = self._catalog.waiting(self.row_bytes)
        if notified is None:  # SQS is unavailable, or Pub/Sub reports no backlog and a pull would wait: `plan` pulls
            return Backlog(messages, oldest, at_least=True) if messages else Backlog(None)
        return Backlog(messages, oldest)

    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]:
        """Lease the oldest files until their estimated rows reach the demand, which the last file may exceed."""
        if demand < 1:
            return []
        self._list_if_due()
        if self._notifications and self._catalog.waiting(self.row_bytes)[0] < demand:
            with self._unless_files_wait():
                self._notifications.take(MOST_FILES, self._catalog.add)
        files, row_bytes = self._catalog.lease(receive_id, self.lease_s, demand, MOST_FILES, self.row_bytes)
        return [
            Share(
                at={"files": [[file.id, file.path, file.modified, file.attempts] for file in part]},
                messages=sum(max(1, round(file.size / row_bytes)) for file in part),
            )
            for part in divided(files, concurrency)
        ]

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        """Read files row by row, in batches of up to 10,000 rows or 16 MiB."""
        for file, path, modified, attempts in share.at["files"]:
            count = 0
            try:
                self._expect(file, path)
                for batch in rows.batches_of(self._files, path, self._format(path), self.max_row_bytes):
                    count += len(batch)
                    yield self._deliveries(batch, file, path, modified, is_again=attempts > 1, receive_id=receive_id)
                self._expect_unchanged(file, path)
            except FileNotFoundError:
                # Also while a folder is not mounted here: the file must not count as done.
                text = "%s: %s was removed or replaced before it was read; looking again in %d s"
                logger.error(text, self.name, path, _MISSING_S)
                self._catalog.release(receive_id, [file], _MISSING_S)
            except (SourceAwayError, OSError) as error:
                if not self._is_unreadable(path):
                    raise self.error(f"{self.root}/{path} cannot be read: {error}", away=True) from None
                text = "%s: %s cannot be read, trying again in %d s: %s. Grant read access, restore it, or remove it"
                logger.error(text, self.name, path, _MISSING_S, error)
                self._catalog.release(receive_id, [file], _MISSING_S)
            self._catalog.count_rows(file, receive_id, count)

    def give_back(self, receive_id: str, not_begun: LeasedIds, begun: LeasedIds) -> None:
        """Release the files with unstarted rows. The other rows of these files are then duplicates."""
        self._catalog.release(receive_id, dict.fromkeys(file for _, ids in not_begun() for file in ids))

    def finish(self, receive_id: str, held: LeasedIds) -> None:
        """Mark the files of the receive as done."""
        self._catalog.finish(receive_id)

    def extend(self, receive_id: str, held: LeasedIds) -> bool:
        """Renew the leases of all files of the receive."""
        return self._catalog.renew(receive_id, self.lease_s)

    def abandon(self, receive_id: str, held: LeasedIds) -> None:
        """Release the files of the receive that are not done."""
        self._catalog.abandon(receive_id)

    def _list_if_due(self) -> None:
        every_s = self.list_every_s
        if every_s is None:
            every_s = _LIST_RARELY_S if self.notifications else _LIST_EVERY_S
        place = f"{self.root}/{self.pattern}"
        if not self.list_root or (started := self._catalog.listing_due(place, every_s)) is None:
            return
        found = {file.id: file for file in self._found()}
        seen = frozenset() if self._catalog.is_new() else self._seen
        self._catalog.add(file for file in found.values() if file.id not in seen)
        self._catalog.record_listing(place, started)
        self.__dict__["_seen"] = frozenset(found)

    @contextmanager
    def _unless_files_wait(self) -> Iterator[None]:
        """Raise an error of the queue or of all look-ups only if no file waits in the catalog; else log it."""
        try:
            yield
        except SourceError as error:
            if not self._catalog.waiting(self.row_bytes)[0]:
                raise
            text = "%s: left notifications in the queue, and continues with the files in the catalog: %s"
            logger.error(text, self.name, error)

    def _expect(self, file: str, path: str) -> None:
        """Raise `FileNotFoundError` if the version of a file no longer exists."""
        found = self._version(path)
        if found is None or found.id != file:
            raise FileNotFoundError(path)

    def _expect_unchanged(self, file: str, path: str) -> None:
        """Raise `SourceError` if an object was replaced while it was read: its rows may be of two versions.

        An object is read by several requests. A local file may grow (docs/connect/files.md), which must not stop a run.
        """
        if not self._lake.is_local and (found := self._version(path)) and found.id != file:
            raise self.error(
                f"{self.root}/{path} was replaced while it was read. The next run reads the new version. "
                "Write new rows to new objects."
            )

    def _is_unreadable(self, path: str) -> bool:
        """Whether the storage answers, but a file cannot be read: access may be denied, or the object be archived."""
        answers = []
        for place in ("", path):
            with suppress(OSError):
                answers.append(self._files.get_file_info(place))
        if not answers:
            return False
        try:
            with self._files.open_input_file(path) as file:
                file.read(1)
        except OSError:
            return True
        return False

    def _version(self, path: str) -> Found | None:
        if self._lake.is_local and self._is_link(path):
            return None
        info = self._files.get_file_info(path)
        return Found.of(info, is_local=self._lake.is_local) if info.is_file else None

    def _is_link(self, path: str) -> bool:
        """Whether a path leads through a symbolic link, which may lead out of the folder."""
        return os.path.realpath(f"{self.root}/{path}") != f"{os.path.realpath(self.root)}/{path}"

    def _paths(self) -> list[str]:
        """Return the paths in a local folder, without symbolic links."""
        paths = []
        for folder, _, names in os.walk(self.root, onerror=_raised):
            for name in names:
                path = os.path.relpath(f"{folder}/{name}", self.root)
                try:
                    path.encode()
                except UnicodeEncodeError:
                    self._leave_out(path, "its name is not UTF-8. Rename it")
                    continue
                if not os.path.islink(f"{folder}/{name}"):
                    paths.append(path)
        return paths

    def _current(self, path: str) -> Found | None:
        """Return the current version of a file; None if it does not exist or is left out."""
        return self._version(path) if self._is_wanted(path) else None

    def _found(self) -> Iterator[Found]:
        try:
            if self._lake.is_local:
                infos = self._files.get_file_info(self._paths())
            else:
                infos = self._files.get_file_info(pafs.FileSelector("", recursive=True, allow_not_found=True))
        except FileNotFoundError:
            raise self.error(f"root {self.root} does not exist. Create it, or correct root.") from None
        except OSError as error:
            raise self.error(f"{self.root} cannot be listed: {error}", away=True) from None
        settle_s = self.settle_s if self.settle_s is not None else _SETTLE_S if self._lake.is_local else 0.0
        newest = time.time() - settle_s
        for info in infos:
            if info.is_file and self._is_wanted(info.path):
                file = Found.of(info, is_local=self._lake.is_local)
                if file.modified <= newest or not settle_s:
                    yield file

    def _is_wanted(self, path: str) -> bool:
        parts = path.split("/")
        is_hidden = any(part.startswith((".", "_")) for part in parts)
        if is_hidden or path.endswith("/") or not fnmatch.fnmatchcase(path, self.pattern):
            return False
        if "" in parts:  # PyArrow lists the key, and cannot read it
            self._leave_out(path, "its key has // or starts with /, and cannot be read. Rename it")
            return False
        if self._format(path) is None:
            self._leave_out(path, "its suffix has no format. Set format")
            return False
        return True

    def _leave_out(self, path: str, why: str) -> None:
        """Log once that a file is left out: a listing finds it every few seconds."""
        if path not in self._left_out:
            self._left_out.add(path)
            logger.warning("%s: left out %r: %s", self.name, path, why)

    @cached_property
    def _left_out(self) -> set[str]:
        """Paths for which this process has logged that they are left out."""
        return set()

    def _format(self, path: str) -> rows.Format | None:
        return self.format or rows.format_of(path)

    @cached_property
    def _seen(self) -> frozenset[str]:
        """Ids of the files of this process's last listing."""
        return frozenset()

    @per_process
    def _notifications(self) -> Notifications | None:
        if self.notifications is None:
            return None
        return Notifications(queue_of(self.notifications, self.name), self.root, self._current)

    @cached_property
    def _lake(self) -> Lake:
        return Lake(root=self.root, storage_options=self.storage_options)

    @cached_property
    def _files(self) -> pafs.FileSystem:
        return self._lake.below(self.root if "://" in self.root else f"file://{self.root}")

    @per_process
    def _database(self) -> Database:
        what = f"source {self.name!r}, catalog"
        return Database(self.catalog, what, SourceError, away=SourceAwayError)

    @per_process
    def _catalog(self) -> Catalog:
        catalog = Catalog(self._database, self.table)
        catalog.create()
        return catalog

    def _deliveries(
        self, batch: Sequence[rows.Row], file: str, path: str, modified: float, *, is_again: bool, receive_id: str
    ) -> pa.RecordBatch:
        published = pa.scalar(datetime.fromtimestamp(modified, UTC), pa.timestamp("us", "UTC"))
        numbers = pa.array([line for line, _, _ in batch], pa.int64())
        problems = [{"problem": problem} if problem else None for _, _, problem in batch]
        return self.deliveries(
            message_id=pc.binary_join_element_wise(file, numbers.cast(pa.string()), "#"),
            data=[data for _, data, _ in batch],
            metadata=problems if any(problems) else None,
            ack_id=pa.repeat(file, len(batch)),
            ack_ref=receive_id,
            redelivered=is_again,
            published_at=pa.repeat(published, len(batch)),
            partition=path,
            sequence=numbers,
        )


def _raised(error: OSError) -> None:
    raise error
