"""Spans of consecutive ids, the compact form of the messages that a receive has leased from a table queue."""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

IdSpan = tuple[int, int]
"""First and last id; all ids between them belong to messages."""

HOLE: Final = 100
"""Maximum number of missing ids between two spans that are still read in a single scan."""

_LOWEST: Final = -(2**63)


def parse_spans(text: str | None) -> list[IdSpan]:
    """Return spans from their JSON."""
    return [(first, last) for first, last in json.loads(text or "[]")]


def merged(spans: Iterable[IdSpan]) -> list[IdSpan]:
    """Return disjoint spans sorted, with adjacent spans joined."""
    joined: list[IdSpan] = []
    for first, last in sorted(spans):
        if joined and joined[-1][1] + 1 == first:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return joined


def gaps(spans: Sequence[IdSpan]) -> list[IdSpan]:
    """Return the spans before and between merged spans, whether they contain messages or not."""
    befores = [_LOWEST, *(last + 1 for _, last in spans)]
    # Without the check, a span that starts at the lowest id would get a gap that ends below it.
    return [(before, first - 1) for before, (first, _) in zip(befores, spans, strict=False) if before < first]


def size(spans: Iterable[IdSpan]) -> int:
    """Return the number of ids in spans."""
    return sum(last - first + 1 for first, last in spans)


def cut_spans(spans: Sequence[IdSpan], ids: int) -> tuple[list[IdSpan], list[IdSpan]]:
    """Divide spans after `ids` ids."""
    head: list[IdSpan] = []
    for index, (first, last) in enumerate(spans):
        if ids <= last - first:
            within = [(first, first + ids - 1)] if ids else []
            return [*head, *within], [(first + ids, last), *spans[index + 1 :]]
        head.append((first, last))
        ids -= last - first + 1
    return head, []


def inside(ids: Sequence[int], spans: Iterable[IdSpan]) -> tuple[list[int], list[int]]:
    """Divide sorted ids into the ids inside sorted spans, and the others."""
    within: list[int] = []
    outside: list[int] = []
    at = 0
    for first, last in spans:
        begin, end = bisect_left(ids, first, at), bisect_right(ids, last, at)
        outside += ids[at:begin]
        within += ids[begin:end]
        at = end
    return within, [*outside, *ids[at:]]


def near(spans: Sequence[IdSpan], hole: int) -> Iterator[list[IdSpan]]:
    """Group sorted spans whose gaps have at most `hole` ids."""
    group: list[IdSpan] = []
    for span in spans:
        if group and span[0] - group[-1][1] > hole + 1:
            yield group
            group = []
        group.append(span)
    if group:
        yield group


def islands(connection: sa.Connection, ids: sa.Select[Any]) -> list[IdSpan]:
    """Return the spans of consecutive ids in a sorted selection of ids."""
    id_ = ids.subquery("fresh").c[0]
    first, last, count = connection.execute(sa.select(sa.func.min(id_), sa.func.max(id_), sa.func.count())).one()
    if not count or last - first + 1 == count:  # the common case: numbering rows takes four times as long
        return [(first, last)] if count else []
    island = (id_ - (sa.func.row_number().over(order_by=id_) - 1)).label(
        "island"
    )  # at least the lowest id: no overflow
    of = sa.select(id_.label("id"), island).subquery("of_islands")
    ends = sa.select(sa.func.min(of.c.id), sa.func.max(of.c.id)).group_by(of.c.island)
    return sorted((first, last) for first, last in connection.execute(ends))


def rows(spans: Sequence[IdSpan], *, is_sqlite: bool) -> sa.FromClause:
    """Return spans as a table with the columns `first` and `last`."""
    if is_sqlite:
        each = sa.func.json_each(json.dumps(spans)).table_valued("value", name="each_span")
        ends = [
            sa.func.json_extract(each.c.value, f"$[{end}]").label(name) for end, name in enumerate(("first", "last"))
        ]
        return sa.select(*ends).subquery("spans")
    arrays: list[Any] = [sa.cast([span[end] for span in spans], postgresql.ARRAY(sa.BigInteger)) for end in (0, 1)]
    columns = (sa.column("first", sa.BigInteger), sa.column("last", sa.BigInteger))
    return sa.func.unnest(*arrays).table_valued(*columns, name="spans").render_derived()
