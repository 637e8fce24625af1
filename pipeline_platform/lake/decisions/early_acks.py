"""Early acknowledgements: tasks acknowledge messages before the decision, and record them first."""

import io
import uuid
from collections.abc import Iterable
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.actions import AckPolicy

AckKey = tuple[str, str]
"""The `ack_ref` and `ack_id` of a delivery."""

_TEXT = ("ack_ref", "ack_id", "action")
_SCHEMA = pa.schema({**dict.fromkeys(_TEXT, pa.string()), "failed": pa.bool_(), "certain": pa.bool_()})


class Entry(NamedTuple):
    """A message that was acknowledged early, or is about to be.

    Attributes:
        ack_ref: Group of the acknowledgement.
        ack_id: Id of the delivery.
        action: The ack action.
        failed: Whether the message had failed by then.
        certain: Whether the call succeeded or its process crashed during it. If not, the call raised and is retried.
    """

    ack_ref: str
    ack_id: str
    action: str
    failed: bool
    certain: bool = True

    def comes_back(self, ack_policy: AckPolicy) -> bool:
        """Whether the message failed and its action asks the source for a redelivery."""
        return self.failed and not ack_policy.ends(self.action)


class Notes:
    """Records of one receive's early acknowledgements: a small file for each call, in the receive's folder."""

    def __init__(self, lake: Lake, pipeline: str, receive_id: str) -> None:
        self._lake, self._receive = lake, f"{pipeline}/_receives/{receive_id}"
        self._folder = f"{self._receive}/_told"
        self._read: dict[str, list[Entry]] = {}

    def write(self, entries: Iterable[Entry], path: str | None = None) -> str:
        """Record messages before they are acknowledged, or replace an earlier record; return the path of the file."""
        rows = [entry._asdict() for entry in entries]
        path, sink = path or f"{self._folder}/{uuid.uuid4().hex}.parquet", io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), sink)
        self._lake.write(path, sink.getvalue())
        return path

    def read(self) -> dict[AckKey, Entry]:
        """Return all recorded messages. Files that were read are not read again."""
        for name in self._lake.names(self._folder):
            if name.endswith(".parquet") and name not in self._read:
                content = self._lake.read(f"{self._folder}/{name}") or b""
                rows = pq.read_table(io.BytesIO(content)).to_pylist() if content else []
                self._read[name] = [Entry(**row) for row in rows]
        return {entry[:2]: entry for entries in self._read.values() for entry in entries}

    def close(self) -> None:
        """Forbid further acknowledgements: the receive is about to be fenced."""
        self._lake.write(f"{self._receive}/_given_up", b"")

    def is_open(self) -> bool:
        """Whether messages that were noted before this call may be acknowledged. The order matters."""
        names = self._lake.names(self._receive)
        return "receive.json" in names and "_given_up" not in names
