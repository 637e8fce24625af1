"""The ledger of receives: what each run leased and wrote, in the lake until its messages are acknowledged."""

from __future__ import annotations

import io
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline_platform.lake.manifest import File, Manifest
from pipeline_platform.lake.storage import Lake

Origin = Literal["source", "failed", "messages"]
"""Where a receive takes its messages from: the pipeline's source, its open failures, or what it received before."""


_OWNER = "_owner-"
"""Begins the name of a folder of manifests; no batcher's staged files have such a name."""


class ReceiveError(Exception):
    """What is kept of a receive cannot be read: names the file, and the way out."""


class Receive(BaseModel):
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
    """

    model_config = ConfigDict(frozen=True)

    receive_id: str
    pipeline: str
    origin: Origin
    run_id: str
    windows: tuple[str, ...]
    demand: int
    asked: int = 0
    context: dict[str, Any] = {}
    base: int
    replaces: tuple[str, ...] = ()
    started_at: datetime
    owner: int = 0

    @property
    def window(self) -> str:
        """Where messages of the source belong."""
        return self.windows[-1]


class Ledger:
    """The receives of a pipeline that are not finished: a folder each, with its record and the manifests of its steps.

    A receive is there from before its lease until after its acknowledgement, whatever dies. A run that takes one over
    keeps manifests of its own, in a folder inside: what the run before it writes late is never read again.
    """

    def __init__(self, lake: Lake, pipeline: str) -> None:
        self._lake, self._folder = lake, f"{pipeline}/_receives"

    def folder(self, receive_id: str) -> str:
        """Where all of one receive lies, as a path under the lake's root."""
        return f"{self._folder}/{receive_id}"

    def begin(self, receive: Receive) -> None:
        """Keep its record."""
        self._lake.write(f"{self.folder(receive.receive_id)}/receive.json", receive.model_dump_json().encode())

    def get(self, receive_id: str) -> Receive | None:
        """Its record; None once it is finished.

        Raises:
            ReceiveError: It cannot be read.
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
            f"{self._lake.uri(path)} is no {what}: restore it, or remove its folder. Delete the rows with its "
            "receive_id before, from every table, if `outcomes` has any. Its messages come back then, when their lease "
            "is over"
        )

    def unfinished(self) -> list[str]:
        """The ids of those that are there."""
        return self._lake.names(self._folder)

    def _manifests(self, receive: Receive) -> str:
        folder = self.folder(receive.receive_id)
        return f"{folder}/{_OWNER}{receive.owner:016x}" if receive.owner else folder

    def owners(self, receive_id: str) -> list[int]:
        """Those that keep manifests of their own, the last one to take it over last."""
        names = self._lake.names(self.folder(receive_id))
        return [int(name.removeprefix(_OWNER), 16) for name in names if name.startswith(_OWNER)]

    def hand_over(self, receive: Receive, owner: int) -> Receive:
        """Copy what one owner kept for the next; return the receive as that one's."""
        mine = receive.model_copy(update={"owner": owner})
        for name in self._steps(folder := self._manifests(receive)):
            if (content := self._lake.read(f"{folder}/{name}")) is not None:
                self._lake.write(f"{self._manifests(mine)}/{name}", content)
        return mine

    def disown(self, receive: Receive) -> None:
        """Remove what its owner keeps."""
        self._lake.remove(self._manifests(receive))

    def write(self, receive: Receive, step: str, manifest: Manifest) -> None:
        """Keep what a step wrote; a step that runs again takes the place of what it wrote before."""
        sink = io.BytesIO()
        pq.write_table(manifest.to_arrow(), sink)
        self._lake.write(f"{self._manifests(receive)}/{step}.parquet", sink.getvalue())

    def forget_after(self, receive: Receive, step: str) -> None:
        """Forget what all steps but one wrote: those after it are to run again."""
        folder = self._manifests(receive)
        for name in self._steps(folder):
            if name != f"{step}.parquet":
                self._lake.remove_file(f"{folder}/{name}")

    def manifest(self, receive: Receive, *steps: str) -> Manifest:
        """What some steps wrote, or all; empty for a step that has not run.

        Raises:
            ReceiveError: It cannot be read.
        """
        folder = self._manifests(receive)
        names = [f"{step}.parquet" for step in steps] or self._steps(folder)
        found = Manifest()
        for name in names:
            content = self._lake.read(f"{folder}/{name}")
            if content is None:
                continue
            try:
                found += Manifest.of(pq.read_table(io.BytesIO(content)))
            except (pa.ArrowException, OSError, ValueError, KeyError) as error:
                what = f"manifest ({len(content)} bytes, {type(error).__name__})"
                raise self._unreadable(f"{folder}/{name}", what) from error
        return found

    def replace_files(self, receive: Receive, replaced: dict[File, File | None]) -> None:
        """Put other files in the place of some, or nothing where none of their rows is left."""
        for name in self._steps(self._manifests(receive)):
            step = name.removesuffix(".parquet")
            manifest = self.manifest(receive, step)
            if any(file in replaced for file in manifest):
                files = (replaced.get(file, file) for file in manifest)
                self.write(receive, step, Manifest(_present(files), manifest.notes))

    def remove(self, receive_id: str) -> None:
        """Forget it: it is finished, or never will be."""
        # A folder that is removed half-way is one without a record, and nobody's any more.
        self._lake.remove_file(f"{self.folder(receive_id)}/receive.json")
        self._lake.remove(self.folder(receive_id))

    def _steps(self, folder: str) -> list[str]:
        return [name for name in self._lake.names(folder) if name.endswith(".parquet")]


def _present(files: Iterable[File | None]) -> list[File]:
    return [file for file in files if file is not None]
