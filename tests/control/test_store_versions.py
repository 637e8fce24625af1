"""Control stores of the release before are migrated, and those of other releases are refused."""

import pytest

from pipeline_platform.control.store import _BEFORE, VERSION, ControlStore, ControlStoreError
from pipeline_platform.sql.database import Database
from tests.fixtures.control import on_both_databases


def set_version(url: str, version: int) -> None:
    with Database(url, "a test", ControlStoreError).writing() as connection:
        connection.exec_driver_sql(f"UPDATE control_version SET version = {version}")


def paused(url: str) -> str | None:
    return ControlStore(url).paused("flights")


@pytest.mark.parametrize(
    ("version", "fix"), [(VERSION + 1, "Upgrade pipeline-platform"), (_BEFORE - 1, "Upgrade to release 0.3.0 first")]
)
@on_both_databases
def test_a_store_of_another_version_is_refused_and_stays_unchanged(control_url, version, fix):
    ControlStore(control_url).pause("flights", "why")
    set_version(control_url, version)
    for _ in range(2):
        with pytest.raises(ControlStoreError, match=rf"have version {version}.*supports version {VERSION}\. {fix}, or"):
            paused(control_url)
    set_version(control_url, VERSION)
    assert paused(control_url) == "why"


@on_both_databases
@pytest.mark.parametrize("version", range(_BEFORE, VERSION))
def test_a_store_of_release_0_3_or_later_gets_the_tables_that_it_lacks(control_url, version):
    ControlStore(control_url).pause("flights", "why")
    with Database(control_url, "a test", ControlStoreError).writing() as connection:
        connection.exec_driver_sql("DROP TABLE control_breakers")
        connection.exec_driver_sql("DROP TABLE control_history")
        connection.exec_driver_sql("DROP TABLE control_marks")
    set_version(control_url, version)

    store = ControlStore(control_url)

    assert (store.paused("flights"), store.breaker("flights").until) == ("why", None)
    store.record_act("flights", "resume", "anna@host")
    assert [act.name for act in store.acts()] == ["resume"]
    assert store.places("log") == {}
