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
    "lost_answers_store_once",
}  # fmt: skip
"""Promises that depend on the database of the catalog."""
REMOTE = {
    *CATALOG, "rows_are_stored", "new_columns_are_added", "tables_are_separate", "closing_is_harmless",
    "what_is_away_is_an_error", "secrets_stay_secret",
}  # fmt: skip
"""Promises that depend on a catalog that is not a database."""
ALL = set(sink_promises())
ASKED_OF = {
    "postgresql with a key": ALL - {
        "what_is_away_is_an_error", "secrets_stay_secret", "closing_is_harmless", "tables_are_separate",
        "changed_types_are_refused",
    },
    "iceberg with a catalog in postgresql": CATALOG,
    "iceberg with a rest catalog": REMOTE | {"killed_commits_store_once"},
    # Unlike Glue, moto does not compare the version of a table. `test_iceberg.py` has an unavailable Glue. Here, the
    # warehouse is on S3.
    "iceberg with glue": REMOTE - {"publishers_at_once_store_once", "what_is_away_is_an_error"}
    | {"replays_replace_rows"},
}  # fmt: skip
"""Promises asked of sinks whose other promises do not depend on their difference to a sink that is asked for all."""
ASKED = [(name, promise) for name in SINKS for promise in sink_promises() if promise in ASKED_OF.get(name, ALL)]


def test_each_promise_that_is_asked_exists():
    assert set().union(*ASKED_OF.values()) <= ALL


@pytest.mark.parametrize(("name", "promise"), ASKED)
def test_a_sink_keeps_its_promise(request, name, promise):
    new, store = SINKS[name](request)
    report = check_sink(new, store, only=promise)
    assert (report.kept, report.not_asked) == ([promise], {})
