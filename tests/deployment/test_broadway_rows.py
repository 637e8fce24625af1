"""The appendix on Broadway's behaviour: a row for every behaviour, and existing tests."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "appendix" / "broadway-behaviour.md").read_text()
BEHAVIOURS = {"Core": 135, "SQS": 44, "RabbitMQ": 89, "Kafka": 62, "Cloud Pub/Sub": 62}
"""Number of tests in Broadway's own suite and in the suite of each connector."""


class Row(NamedTuple):
    """A behaviour that Broadway's tests show, the number of these tests, and its counterpart here."""

    behaviour: str
    tests: int
    here: str


def rows(part: str) -> Iterator[Row]:
    section = DOCUMENT.partition(f"\n## {part}\n")[2].partition("\n## ")[0]
    for line in section.splitlines():
        if line.startswith("|") and not line.startswith(("|-", "| in Broadway |")):
            behaviour, tests, here = (cell.strip() for cell in line.strip("|").split("|"))
            yield Row(behaviour, int(tests), here)


@pytest.mark.parametrize(("part", "tests"), BEHAVIOURS.items())
def test_every_behaviour_has_a_row(part, tests):
    assert sum(row.tests for row in rows(part)) == tests
    assert [row for row in rows(part) if row.tests < 1] == []


@pytest.mark.parametrize("part", BEHAVIOURS)
def test_each_row_names_its_counterpart(part):
    unsaid = [row.behaviour for row in rows(part) if not (row.behaviour and row.here.removeprefix("open:").strip())]
    assert unsaid == []


def test_every_test_that_is_named_exists():
    named = set(re.findall(r"`(test_\w+|Test\w+)`", DOCUMENT))
    written = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:def |class )?(test_\w+|Test\w+)(?:\(| = |:)", file.read_text(), re.M)
    }
    assert len(named) > 100
    assert sorted(named - written - {"test_message", "test_batch"}) == []
