"""The promises of every sink, checked on real stores, a promise per test. A new sink needs a row in `SINKS`."""

from collections.abc import Callable

import pytest

from pipeline_platform.testing import check_sink, sink_promises
from tests.fixtures.sinks import Kind, glue_and_s3, iceberg, postgresql

SINKS: dict[str, Callable[[pytest.FixtureRequest], Kind]] = {
    "postgresql": lambda request: postgresql(request.getfixturevalue("postgres_url")),
    "postgresql with a key": lambda request: postgresql(
        request.getfixturevalue("postgres_url"), key=("number",), order="number"
    ),
    "iceberg": lambda request: iceberg(request.getfixturevalue("tmp_path")),
    "iceberg with a catalog in postgresql": lambda request: iceberg(
        request.getfixturevalue("tmp_path"),
        uri=request.getfixturevalue("postgres_url").replace("postgresql:", "postgresql+psycopg:"),
    ),
    "iceberg with a rest catalog": lambda request: iceberg(
        request.getfixturevalue("tmp_path"), type="rest", uri=request.getfixturevalue("iceberg_rest_server")
    ),
    "iceberg with glue": lambda request: iceberg(
        request.getfixturevalue("tmp_path"),
        **glue_and_s3(*map(request.getfixturevalue, ("glue_server", "s3", "tmp_path"))),
    ),
}
CATALOG = {
    "publishing_again_stores_nothing", "publishers_at_once_store_once", "ensuring_at_once_is_harmless",
    "lost_answers_store_once", "killed_commits_store_once",
}  # fmt: skip
"""Promises that depend on the database of the catalog."""
LEFT_OUT = {
    # Unlike Glue, moto does not compare the version of a table.
    ("iceberg with glue", "publishers_at_once_store_once"),
    # A call of an unavailable Glue takes 17 s. `test_iceberg.py` makes one such call.
    ("iceberg with glue", "what_is_away_is_an_error"),
}
"""Promises that are not tested here."""
ASKED = [
    (name, promise)
    for name in SINKS
    for promise in sink_promises()
    if (promise in CATALOG or name != "iceberg with a catalog in postgresql") and (name, promise) not in LEFT_OUT
]


def test_each_promise_that_is_left_out_exists():
    assert {(name, promise) for name in SINKS for promise in sink_promises()} >= LEFT_OUT


@pytest.mark.parametrize(("name", "promise"), ASKED)
def test_a_sink_keeps_its_promise(request, name, promise):
    new, store = SINKS[name](request)
    report = check_sink(new, store, only=promise)
    assert (report.kept, report.not_asked) == ([promise], {})
