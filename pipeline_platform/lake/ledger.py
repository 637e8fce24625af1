"""The ledger of receives: what each run leased and wrote, in the lake until its messages are acknowledged."""

import io
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ValidationError

from pipeline_platform.lake.failure_events import ALL, Selection
from pipeline_platform.lake.manifest import File, Manifest
from pipeline_platform.lake.storage import Lake

Origin = Literal["source", "failed", "messages"]
"""Where a receive takes its messages from: the pipeline's source, its open failures, or what it received before."""

_OWNER = "_owner-"
"""Begins the name of a folder of manifests; no batcher's staged files have such a name."""


def owners_among(names: Iterable[str]) -> list[int]:
    """The runs that took a receive over, by the names in its folder."""
    return [int(name.removeprefix(_OWNER), 16) for name in names if name.startswith(_OWNER)]


class ReceiveError(Exception):
    """The record or a manifest of a receive cannot be read. Names the file and the way out."""


class Receive(BaseModel, frozen=True):
    """What one run took on.

    Attributes:
        receive_id: Names its lease, its files, its transaction and its Spark work.
        pipeline: Name of the pipeline.
        origin: `source`, `failed` (a backfill of failures) or `messages` (a full replay).
        run_id: Of the Dagster run that works on it: the one that began it, or re-executes its later steps.
        windows: Partition keys that the run is about; messages from the source belong to the last.
        demand: How many messages it may take on.
        asked: How many it was to take on; more than `demand` where a backfill found no room for all.
        context: What the run changes in the pipeline's context.
        base: Version of `outcomes` that it looked at before it received: what came later is looked at again.
        replaces: For a replay: the receives whose rows it takes the place of.
        started_at: When.
        owner: Which of the runs that took it over holds it, by `lake.decision`; 0 for the run that began it.
        producer: Name of the producer it pulls from; empty for the only one, and where it pulls from none.
        selection: Of the open failures, those that a backfill drives.
        traceparent: Of the run's trace, as W3C has it; empty where nobody traces.
        control: Id of the control store that knows whether its run lives; empty if an earlier release began it.
        place: That store, and the host, for people.
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
    owner: int = 0
    producer: str = ""
    selection: Selection = ALL
    traceparent: str = ""
    control: str = ""
    place: str = ""

    @property
    def window(self) -> str:
        """Where messages of the source belong."""
        return self.windows[-1]


class Ledger:
    """The receives of a pipeline that are not finished: a folder each, with its record and the manifests of its steps.

    A receive is there from before its lease until after its acknowledgement, whatever dies. A run that takes one over
    writes manifests of its own, in a folder inside: nobody reads what the run before it writes late.

    It remembers each manifest that it wrote or read, for it is asked only for manifests that nobody else changes: those
    of its own run, which one process at a time writes, and those of decided receives.
    """

    def __init__(self, lake: Lake, pipeline: str) -> None:
        self._lake, self._folder = lake, f"{pipeline}/_receives"
        self._known: dict[str, Manifest] = {}

    def folder(self, receive_id: str) -> str:
        """Where all of one receive lies, as a path under the lake's root."""
        return f"{self._folder}/{receive_id}"

    def begin(self, receive: Receive) -> None:
        """Write its record."""
        self._lake.write(f"{self.folder(receive.receive_id)}/receive.json", receive.model_dump_json().encode())

    def get(self, receive_id: str) -> Receive | None:
        """Its record as it is now, None once it is finished; a `ReceiveError` if it cannot be read."""
        path = f"{self.folder(receive_id)}/receive.json"
        record = self._lake.read(path)
        try:
            return None if record is None else Receive.model_validate_json(record)
        except ValidationError as error:
            what = f"record of a receive ({len(record or b'')} bytes, {error.errors()[0]['type']})"
            raise self._unreadable(path, what) from error

    def _unreadable(self, path: str, what: str) -> ReceiveError:
        return ReceiveError(
            f"{self._lake.uri(path)} is no {what}: restore it, or remove its folder. Delete the rows with its "
            "receive_id before, from every table, if `outcomes` has any. Its messages come back then, when their lease "
            "is over"
        )

    def unfinished(self) -> list[str]:
        """The ids of the receives that are there."""
        return self._lake.names(self._folder)

    def under_way(self) -> tuple[list[Receive], list[ReceiveError]]:
        """The receives that are there, and an error for each record that cannot be read."""
        found, unreadable = [], []
        for receive_id in self.unfinished():
            try:
                found += [receive] if (receive := self.get(receive_id)) else []
            except ReceiveError as error:
                unreadable.append(error)
        return found, unreadable

    def _path(self, receive: Receive, step: str = "") -> str:
        """Of the folder of its owner's manifests, or of one of them."""
        owner = f"{_OWNER}{receive.owner:016x}" if receive.owner else ""
        return "/".join(filter(None, (self.folder(receive.receive_id), owner, step and f"{step}.parquet")))

    def steps(self, receive: Receive) -> list[str]:
        """The steps whose manifests its owner has written."""
        names = self._lake.names(self._path(receive))
        return [name.removesuffix(".parquet") for name in names if name.endswith(".parquet")]

    def owners(self, receive_id: str) -> list[int]:
        """The runs that took the receive over and have manifests of their own; the last one comes last."""
        return owners_among(self._lake.names(self.folder(receive_id)))

    def hand_over(self, receive: Receive, owner: int) -> Receive:
        """Copy the manifests of one owner, as they are now, for the next; return the receive as the next one's."""
        mine = receive.model_copy(update={"owner": owner})
        self._lake.remove(self._path(mine))  # what an earlier try copied may be outdated
        for step in self.steps(receive):
            if (content := self._lake.read(self._path(receive, step))) is not None:
                self._lake.write(self._path(mine, step), content)
        return mine

    def write(self, receive: Receive, step: str, manifest: Manifest) -> None:
        """Write what a step wrote, in the place of what it wrote before."""
        path, sink = self._path(receive, step), io.BytesIO()
        pq.write_table(manifest.to_arrow(), sink)
        self._known.pop(path, None)
        self._lake.write(path, sink.getvalue())
        self._known[path] = manifest

    def forget_after(self, receive: Receive, step: str) -> None:
        """Remove what all steps but one wrote: those after it are to run again."""
        for later in self.steps(receive):
            if later != step:
                path = self._path(receive, later)
                self._known.pop(path, None)
                self._lake.remove_file(path)

    def manifest(self, receive: Receive, *steps: str) -> Manifest:
        """What some steps wrote, or all, empty for a step that has not run; a `ReceiveError` if it cannot be read."""
        paths = (self._path(receive, step) for step in steps or self.steps(receive))
        return sum(map(self._read, paths), Manifest())

    def _read(self, path: str) -> Manifest:
        if path not in self._known:
            content = self._lake.read(path)
            if content is None:
                return Manifest()
            try:
                self._known[path] = Manifest.of(pq.read_table(io.BytesIO(content)))
            except (pa.ArrowException, OSError, ValueError, KeyError) as error:
                raise self._unreadable(path, f"manifest ({len(content)} bytes, {type(error).__name__})") from error
        return self._known[path]

    def replace_files(self, receive: Receive, replaced: dict[File, File | None]) -> None:
        """Put other files in the place of some, or nothing where none of their rows is left."""
        for step in self.steps(receive):
            manifest = self._read(self._path(receive, step))
            if not replaced.keys().isdisjoint(manifest):
                files = [new for file in manifest if (new := replaced.get(file, file)) is not None]
                self.write(receive, step, Manifest(files, manifest.notes))

    def remove(self, receive_id: str) -> None:
        """Forget a receive: it is finished, or never will be."""
        folder = self.folder(receive_id)
        self._known = {path: known for path, known in self._known.items() if not path.startswith(f"{folder}/")}
        # A folder that is removed half-way is one without a record, and nobody's any more.
        self._lake.remove(folder, first="receive.json")
