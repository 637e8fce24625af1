"""`--set`: fields of the context that callbacks of the launched runs get, and no others."""

import re
from datetime import date

import pytest
import typer
from pydantic import BaseModel

from pipeline_platform import Pipeline, PipelineError
from pipeline_platform.cli.launch import retry_failures
from pipeline_platform.cli.runs.context_settings import settings_of
from pipeline_platform.lake.storage import Lake
from pipeline_platform.orchestration.asset_windows import window_now
from tests.fixtures.failures import event, record
from tests.fixtures.pipelines_under_test import Told
from tests.fixtures.small_lake import Keeping, Memory


class Rich(BaseModel):
    """Fields of many types."""

    yes: bool = False
    most: float = 3.5
    code: str = ""
    since: date = date(2026, 1, 1)
    carriers: list[str] = []
    limit: int | None = 5


class Enriched(Pipeline, abstract=True):
    """A pipeline whose runs change these fields."""

    name = "enriched"
    context = Rich()


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("yes=true", True),
        ("yes=yes", True),
        ("most=3", 3.0),
        ("code=007", "007"),
        ("code=a=b", "a=b"),
        ("code=", ""),
        ("since=2026-02-03", "2026-02-03"),
        ('carriers=["UA", "DL"]', ["UA", "DL"]),
        ("limit=null", None),
        ("limit=7", 7),
    ],
)
def test_a_value_is_json_or_text_of_the_type_of_the_field(given, value):
    name = given.partition("=")[0]
    settings = settings_of(Enriched, [given])
    assert settings == {name: value}
    assert type(settings[name]) is type(value)


@pytest.mark.parametrize(
    ("pipeline", "given", "text"),
    [
        (Enriched, "yes", "'yes' is not NAME=VALUE."),
        (Enriched, "=5", "'=5' is not NAME=VALUE."),
        (Enriched, "yas=true", "Enriched.context.yas: is not a field of the context. Did you mean 'yes'?"),
        (Enriched, "yes=maybe", "Enriched.context.yes: must be a valid boolean"),
        (Enriched, "limit=many", "Enriched.context.limit: must be a valid integer"),
        (Keeping, "yes=true", "keeping has no context whose fields could be set."),
    ],
)
def test_an_unknown_field_or_a_wrong_value_is_refused(pipeline, given, text):
    with pytest.raises(typer.BadParameter, match=re.escape(text)):
        settings_of(pipeline, [given])


@pytest.fixture
def failed(tmp_path):
    """A lake with an open failure."""
    record(Lake(root=str(tmp_path / "lake")), "r1", event("a"), pipeline="told", window=window_now(Told))


def test_a_retry_with_a_setting_changes_the_context_of_its_runs(beside, failed, launched, monkeypatch, tmp_path):
    cli = beside(Told, queue=Memory())
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    refused = cli("failures", "retry", "told", "--since", "2h", "--set", "forgivng=true")
    assert (refused.exit_code, launched) == (2, [])
    answer = cli("failures", "retry", "told", "--since", "2h", "--set", "forgiving=true")
    assert answer.exit_code == 0, answer.output
    assert [config for _, config, _ in launched] == [{"origin": "failed", "context": {"forgiving": True}}]
    acts = cli("history", "told").stdout
    assert "set forgiving" in acts, "the name, because a value may be personal data"
    assert Told.context.forgiving is False


def test_python_retries_with_a_setting(beside, failed, launched, monkeypatch, tmp_path):
    beside(Told, queue=Memory())
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    with pytest.raises(PipelineError):
        retry_failures("told", settings={"forgivng": True})
    retry_failures("told", settings={"forgiving": True})
    assert [config for _, config, _ in launched] == [{"origin": "failed", "context": {"forgiving": True}}]
