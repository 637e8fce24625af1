"""Free offsets of a log, their fair choice, and their division into shares, for generated spans."""

from hypothesis import given
from hypothesis import strategies as st

from pipeline_platform.source.log import Extent, divided, fair, free_offsets
from pipeline_platform.source.offsets import Offsets, Place

HOLDERS = st.sampled_from([None, "a", "b"])


@st.composite
def places(draw: st.DrawFn) -> Place:
    """Generate a partition with disjoint spans, some before its acknowledged offset."""
    bounds = sorted(draw(st.sets(st.integers(0, 40), max_size=12)))
    spans = tuple(
        Offsets("p", first, past, draw(HOLDERS)) for first, past in zip(bounds[::2], bounds[1::2], strict=False)
    )
    reached = max((span.past for span in spans), default=0)
    return Place("p", draw(st.integers(0, 40)), reached, spans)


@given(place=places(), low=st.integers(0, 10), size=st.integers(0, 40), start=st.integers(0, 50))
def test_free_offsets_lie_between_start_and_end_outside_spans(place, low, size, start):
    free = free_offsets(Extent(low, low + size, None, low), place, start)
    taken = {offset for span in place.spans for offset in range(span.first, span.past)}
    offsets = [offset for span in free for offset in range(span.first, span.past)]
    assert offsets == [offset for offset in range(start, low + size) if offset not in taken]
    assert all(span.first < span.past and span.partition == "p" for span in free)


FREE = st.dictionaries(
    st.sampled_from("abcdef"), st.lists(st.integers(1, 30), max_size=4), max_size=6
).map(
    lambda sizes: {
        partition: [Offsets(partition, 100 * nth, 100 * nth + size) for nth, size in enumerate(found)]
        for partition, found in sizes.items()
    }
)  # fmt: skip


def total(spans: list[Offsets]) -> int:
    return sum(span.past - span.first for span in spans)


@given(free=FREE, demand=st.integers(0, 200))
def test_the_demand_is_met_and_divided_fairly_over_partitions(free, demand):
    chosen = fair(free, demand)
    assert total(chosen) == min(demand, sum(map(total, free.values())))
    got = {partition: total([span for span in chosen if span.partition == partition]) for partition in free}
    hungry = [got[partition] for partition, spans in free.items() if got[partition] < total(spans)]
    assert max(got.values(), default=0) - min(hungry, default=0) <= 1 or not hungry
    for partition, spans in free.items():
        mine = [span for span in chosen if span.partition == partition]
        offsets = [offset for span in spans for offset in range(span.first, span.past)]
        assert [o for span in mine for o in range(span.first, span.past)] == offsets[: got[partition]], "from the first"


@given(free=FREE, demand=st.integers(0, 200), concurrency=st.integers(1, 7))
def test_shares_are_equal_and_contain_each_offset_once(free, demand, concurrency):
    spans, reached = fair(free, demand), {partition: ord(partition) for partition in free}

    shares = divided(spans, reached, concurrency)

    sizes = [share.messages for share in shares]
    assert len(shares) == min(concurrency, total(spans))
    assert not sizes or max(sizes) - min(sizes) <= 1
    for share in shares:
        assert sum(past - first for _, first, past, _ in share.at["spans"]) == share.messages
        assert all(until == reached[partition] for partition, _, _, until in share.at["spans"])
    given_out = sorted(
        (partition, offset)
        for share in shares
        for partition, first, past, _ in share.at["spans"]
        for offset in range(first, past)
    )
    assert given_out == sorted((span.partition, at) for span in spans for at in range(span.first, span.past))
