"""What callbacks say, in the log of a run of Dagster whose tasks are Spark's."""

from tests.fixtures.dagster import Location


def test_the_log_of_a_run_tells_what_callbacks_printed_and_logged(location: Location) -> None:
    location.enqueue("a line", "letter x", "fail quietly", "fail deadly")

    run = location.run("talkative_pull")

    assert run.is_success
    log = location.log(run)
    told = [line for line in log.replace("\\n", "\n").splitlines() if line]
    for line in (
        "handling a line",
        "logged a line",
        "batching 1",
        "splitting at 0",
        "failed 1",
        "handling fail deadly",
    ):
        assert any(text.startswith(line) for text in told), line
    assert "callbacks of task 0 said" in log
    assert "the splitter of 'letters' said" in log
