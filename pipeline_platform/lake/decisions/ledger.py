"""The ledger of unfinished receives: a record and manifests in the lake, until the messages are acknowledged."""

import io
from datetime import datetime
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ValidationError

from pipeline_platform.lake.failures.failure_events import ALL, Selection
from pipeline_platform.lake.manifest import File, Manifest
from pipeline_platform.lake.storage import Lake

Origin = Literal["source", "failed", "messages"]
"""Origin of the messages of a receive: the source, open failures, or messages that were received before."""

_PUBLISHED = "published"
"""Empty file in the folder of a published receive that stays unfinished."""


class ReceiveError(Exception):
    """The record or a manifest of a receive cannot be read. Names the file and the way out."""


class Receive(BaseModel, frozen=True):
    """Messages that one run leased together, and the request that led to them.

    Attributes:
        receive_id: Id of its lease, files, transactions and Spark work.
        pipeline: Name of the pipeline.
        origin: `source`, `failed` (a retry of failures) or `messages` (a full replay).
        run_id: Id of the Dagster run that started it.
        windows: Partition keys of the run; messages from the source belong to the last one.
        demand: Maximum number of messages.
        asked: Number of messages requested; more than `demand` if a retry found no capacity for all.
        context: Overridden fields of the pipeline's context.
        base: Version of `outcomes` before it received. The decision looks at later commits.
        replaces: Receives whose rows a replay replaces.
        started_at: Start of the receive.
        producer: Name of its producer; empty for the only producer, and for retries and replays.
        selection: Open failures that a retry selects.
        traceparent: W3C trace context of the run; empty without tracing.
        control: Id of the control store of its run.
        place: Control store and host, for people.
    """

    receive_id: str
    pipeline: str
    origin: Origin
    run_id: str
    windows: tuple[str, ...]
    demand: int = 0
    asked: int = 0
    context: dict[str, Any] = {}
    base: int = 0
    replaces: tuple[str, ...] = ()
    started_at: datetime
    producer: str = ""
    selection: Selection = ALL
    traceparent: str = ""
    control: str = ""
    place: str = ""

    @property
    def window(self) -> str:
        """Window of messages that are pulled from the source."""
        return self.windows[-1]


class Ledger:
    """Unfinished receives of a pipeline: a folder each, with a record and the manifests of its steps.

    The record of a receive exists from before its lease until after its acknowledgement.

    Manifests are cached, because those of a run's own receive are written by one process at a time. Other receives may
    be finished by any process: before a run works on them, it calls `unfinished` or `forget`.
    """

    def __init__(self, lake: Lake, pipeline: str) -> None:
        self._lake, self._folder = lake, f"{pipeline}/_receives"
        self._known: dict[str, Manifest] = {}

    def folder(self, receive_id: str) -> str:
        """Return the folder of a receive, as a path under the lake's root."""
        return f"{self._folder}/{receive_id}"

    def begin(self, receive: Receive) -> None:
        """Write its record."""
        self._lake.write(f"{self.folder(receive.receive_id)}/receive.json", receive.model_dump_json().encode())

    def get(self, receive_id: str) -> Receive | None:
        """Return the record of a receive; None once it is finished.

        Raises:
            ReceiveError: The record cannot be read.
        """
        path = f"{self.folder(receive_id)}/receive.json"
        record = self._lake.read(path)
        try:
            return None if record is None else Receive.model_validate_json(record)
        except ValidationError as error:
            what = f"record of a receive ({len(record or b'')} bytes, {error.errors()[0]['type']})"
            raise self._unreadable(path, what) from error

    def _unreadable(self, path: str, what: str) -> ReceiveError:
        return ReceiveError(
            f"{self._lake.uri(path)}: not a valid {what}. Restore it, or remove its folder; if `outcomes` has rows "
            "with its receive_id, first delete such rows from every table. Its messages are redelivered when their "
            "lease expires"
        )

    def unfinished(self) -> list[str]:
        """Return the ids of unfinished receives, and forget cached manifests."""
        self.forget()
        return self._lake.folders(self._folder)

    def under_way(self) -> tuple[list[Receive], list[ReceiveError]]:
        """Return the unfinished receives, and an error for each record that cannot be read."""
        found, unreadable = [], []
        for receive_id in self.unfinished():
            try:
                found += [receive] if (receive := self.get(receive_id)) else []
            except ReceiveError as error:
                unreadable.append(error)
        return found, unreadable

    def _path(self, receive: Receive, step: str = "") -> str:
        return "/".join(filter(None, (self.folder(receive.receive_id), step and f"{step}.parquet")))

    def steps(self, receive: Receive) -> list[str]:
        """Return the steps that have written their manifests."""
        names = self._lake.names(self._path(receive))
        return [name.removesuffix(".parquet") for name in names if name.endswith(".parquet")]

    def write(self, receive: Receive, step: str, manifest: Manifest) -> None:
        """Write the manifest of a step, in place of an earlier one."""
        path, sink = self._path(receive, step), io.BytesIO()
        pq.write_table(manifest.to_arrow(), sink)
        self._known.pop(path, None)
        self._lake.write(path, sink.getvalue())
        self._known[path] = manifest

    def manifest(self, receive: Receive, *steps: str) -> Manifest:
        """Return the manifest of some steps, or of all; a step that has not run adds nothing.

        Raises:
            ReceiveError: A manifest cannot be read.
        """
        paths = (self._path(receive, step) for step in steps or self.steps(receive))
        return sum(map(self._read, paths), Manifest())

    def _read(self, path: str) -> Manifest:
        if (known := self._known.get(path)) is not None:
            return known
        content = self._lake.read(path)
        if content is None:
            return Manifest()
        try:
            manifest = Manifest.of(pq.read_table(io.BytesIO(content)))
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            raise self._unreadable(path, f"manifest ({len(content)} bytes, {type(error).__name__})") from error
        self._known[path] = manifest
        return manifest

    def forget(self) -> None:
        """Read all manifests again when they are needed next."""
        self._known = {}

    def note_published(self, receive: Receive) -> None:
        """Note that a receive is published and stays unfinished. A replay may then remove all its rows from a table."""
        self._lake.write(f"{self.folder(receive.receive_id)}/{_PUBLISHED}", b"")

    def was_published(self, receive: Receive) -> bool:
        """Whether `note_published` was called."""
        return self._lake.read(f"{self.folder(receive.receive_id)}/{_PUBLISHED}") is not None

    def replace_files(self, receive: Receive, replaced: dict[File, File | None]) -> None:
        """Replace files of a receive by others, or by nothing if no row is left."""
        for step in self.steps(receive):
            manifest = self._read(self._path(receive, step))
            if not replaced.keys().isdisjoint(manifest):
                files = [new for file in manifest if (new := replaced.get(file, file)) is not None]
                self.write(receive, step, Manifest(files, manifest.reports))

    def remove(self, receive_id: str) -> None:
        """Remove a receive, which is finished or fenced."""
        self.forget()
        # A crash in between leaves a folder without a record, which a later run removes.
        self._lake.remove(self.folder(receive_id), first="receive.json")
