"""Looks at the shards of a stream: shards that may be read, have messages, or have lost messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from pipeline_platform.connectors.kinesis.kinesis_api import THREADS, KinesisApi, Shard
from pipeline_platform.connectors.kinesis.marks import Mark
from pipeline_platform.connectors.kinesis.shard_cursor import Look, ShardCursor
from pipeline_platform.source.offsets import Place

_GONE = "expired before all its messages were read. Raise the retention, or run the pipeline more often"


@dataclass
class Looked:
    """Result of a look at a stream.

    Attributes:
        shards: Shards that have not expired, by their permanent names.
        waiting: Shards that may be read and have messages.
        changed: Shards with another mark now: the mark before the look, and the new one.
        lost: Descriptions of messages that Kinesis may have deleted before they were read, by shard.
        gone: Descriptions of shards that expired before all their messages were read.
    """

    shards: Mapping[str, Shard]
    waiting: dict[str, Look] = field(default_factory=dict)
    changed: dict[str, tuple[str, Mark]] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)


class ShardLooks:
    """Looks at shards, with iterators that are kept from one look to the next."""

    def __init__(self, api: KinesisApi) -> None:
        self._api = api
        self._cursors: dict[str, tuple[str, ShardCursor]] = {}

    def look(self, shards: Mapping[str, Shard], places: Mapping[str, Place], most: int, now: float) -> Looked:
        """Look at the shards that no receive has leased, after all messages of their parents are acknowledged.

        Args:
            shards: Shards that have not expired, by their permanent names; their parents by the same names.
            places: Positions of these shards, and of expired shards of the stream.
            most: Records to look for in each shard.
            now: Time by the server's clock: with a later time, messages would be skipped.
        """
        found, retention_s = Looked(shards), self._api.stream().retention_s
        marks = {name: Mark.of(places[name].mark) for name in shards}
        ended = {name for name, mark in marks.items() if mark.ended}
        left = {name for name in shards if name not in ended and not places[name].spans}
        # Several times: shards that have ended make their children readable.
        while due := {name for name in left if {*shards[name].parents} & {*shards} <= ended}:
            left -= due
            for name, look in self._looks({name: shards[name] for name in due}, places, most):
                mark, text = marks[name], places[name].mark
                if lost := mark.lost(now, retention_s):
                    found.lost[name] = lost
                if look.is_waiting:
                    found.waiting[name] = look
                elif look.has_ended:
                    ended.add(name)
                    found.changed[name] = text, mark.model_copy(update={"ended": True})
                elif mark.is_late(now):  # a loss is reported once: nothing waits
                    found.changed[name] = text, mark.caught_up(now)
        for name, place in places.items():
            if name not in shards and not place.spans and not Mark.of(place.mark).ended:
                found.gone[name] = _GONE
        return found

    def _looks(self, shards: Mapping[str, Shard], places: Mapping[str, Place], most: int) -> Iterable[tuple[str, Look]]:
        cursors = [self._cursor(name, shard, places[name].mark) for name, shard in shards.items()]
        if len(cursors) == 1:
            return [(name, cursor.look(most)) for name, cursor in zip(shards, cursors, strict=True)]
        with ThreadPoolExecutor(THREADS) as pool:
            return list(zip(shards, pool.map(partial(ShardCursor.look, most=most), cursors), strict=True))

    def _cursor(self, name: str, shard: Shard, mark: str) -> ShardCursor:
        known, cursor = self._cursors.get(name, ("", None))
        if cursor is None or known != mark:
            cursor = ShardCursor(self._api, shard.id, shard.hash_keys, Mark.of(mark))
            self._cursors[name] = mark, cursor
        return cursor
