"""The command line on a pipeline with several producers: each is shown, paused and limited by its name."""

from datetime import timedelta

import pytest
from click.testing import Result

from pipeline_platform.model.options import RateLimiting
from tests.fixtures.pipelines_under_test import Coasts, Told
from tests.fixtures.small_lake import Memory

FIVE = RateLimiting(allowed_messages=5, interval=timedelta(seconds=2))


@pytest.fixture
def cli(beside):
    queue, west = Memory(deliveries_=(("1", b""),) * 7), Memory(deliveries_=(("1", b""),) * 9)
    return beside(Coasts, Told, queue=queue, beside_queue=west)


def shown(answer: Result) -> dict[str, str]:
    """Return the rows of `status` by label."""
    rows = [line.strip().partition("  ") for line in answer.stdout.splitlines()]
    return {name: value.strip() for name, _, value in rows if value}


def test_status_shows_each_producer_and_what_belongs_to_none(cli, control):
    control.set_rate_limiting("coasts/west", FIVE)
    control.pause("coasts/east", "moves")
    for key, messages in (("coasts/east", 3), ("coasts", 4)):
        control.claim(key, f"of {key}", key[::-1], wanted=messages, capacity=10, lease_s=60)

    said = shown(cli("status", "coasts"))

    assert said["east: backlog"] == "7 messages in queue"
    assert said["west: backlog"] == "9 messages in beside_queue"
    assert said["east: state"] == "paused: moves"
    assert said["west: state"] == "not paused; unknown whether runs are requested: DAGSTER_HOME is not set"
    assert (said["east: rate limit"], said["west: rate limit"]) == ("none", "5 messages every 2 s, set at run time")
    assert said["west: permits"] == "5 left in the current interval"
    assert said["east: in flight"] == "3 messages in 1 run"
    assert said["west: in flight"] == "0 messages in 0 runs"
    assert said["retries, replays: in flight"] == "4 messages in 1 run"
    assert said["open failures"] == "none"


def test_status_of_a_pipeline_with_one_names_none(cli):
    said = shown(cli("status", "told"))
    assert said["backlog"] == "7 messages in queue"
    assert not [row for row in said if ": " in row and not row.startswith(("Control", "Lake"))]


def test_a_producer_is_paused_and_resumed_alone(cli, control):
    assert "Paused coasts/east: moves." in cli("pause", "coasts", "--producer", "east", "--reason", "moves").stdout
    assert [control.paused(f"coasts/{name}") for name in ("east", "west")] == ["moves", None]
    cli("pause", "coasts", "--reason", "all move")
    assert "coasts/west is still paused: all move" in cli("resume", "coasts", "--producer", "west").stdout
    told = cli("resume", "coasts").stdout
    assert "Resumed coasts." in told
    assert "coasts/east is still paused: moves" in told
    assert "Resumed coasts/east." in cli("resume", "coasts", "--producer", "east").stdout
    assert control.paused("coasts/east") is None


def test_a_pause_of_all_counts_what_each_has_in_flight(cli, control):
    for key in ("coasts/east", "coasts"):
        control.stand_by(key, f"run of {key}", 60)
        control.claim(key, f"of {key}", f"run of {key}", wanted=3, capacity=10, lease_s=60)
    control.stand_by("coasts/west", "between two rounds", 60)
    assert "6 messages in 2 runs will still be handled." in cli("pause", "coasts").stdout
    assert "No messages are in flight." in cli("pause", "coasts", "--producer", "west").stdout


def test_a_limit_is_of_the_producer_that_is_named(cli, control):
    told = cli("limit", "coasts", "--producer", "west", "--allowed", "5", "--interval", "2").stdout
    assert "Rate limit of coasts/west: 5 messages every 2 s." in told
    assert control.rate_limiting("coasts/west", None) == FIVE
    assert control.rate_limiting("coasts/east", None) is None
    assert control.rate_limiting("coasts", None) is None
    assert "coasts/east has no rate limit." in cli("limit", "coasts", "--producer", "east").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("limit", "coasts"), "coasts has a rate limit per producer. Choose one of east, west."),
        (("limit", "coasts", "--producer", "wets"), "has no producer 'wets'. Did you mean 'west'?"),
        (("pause", "coasts", "--producer", "north"), "has no producer 'north'"),
        (("resume", "told", "--producer", "east"), "has no producer 'east'"),
    ],
)
def test_a_producer_that_is_missing_or_unknown_is_refused_with_those_there_are(cli, arguments, words):
    answer = cli(*arguments)
    assert answer.exit_code == 2
    assert words in " ".join(answer.output.replace("│", " ").split())
