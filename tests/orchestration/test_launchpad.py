"""The initial config of the launchpad, as the UI gets it by GraphQL, and the config that it accepts."""

import asyncio
import sys
from collections.abc import Sequence
from datetime import date

import dagster as dg
import pytest
from dagster._core.remote_origin import InProcessCodeLocationOrigin
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import InProcessWorkspaceLoadTarget
from dagster_graphql.schema import create_schema
from pydantic import BaseModel, Field

from pipeline_platform import Pipeline
from pipeline_platform.model.strict_options import PipelineError
from pipeline_platform.orchestration import ControlResource
from pipeline_platform.orchestration.limits_job import LimitsConfig
from pipeline_platform.orchestration.resources.launchpad import out_of_launchpad
from pipeline_platform.orchestration.runs.receive_config import receive_config_of, without_variables
from pipelines.flights import Rules
from tests.fixtures.keeper import PROJECT

RECEIVE = """\
ops:
  flights:
    ops:
      receive_messages:
        config:
          context:
            cancelled_is_valid: false
          ignore_pause: false
"""
LIMITS = """\
ops:
  change:
    config:
      allowed_messages: null
      concurrency: null
      drain: false
      interval_s: null
      max_demand: null
      max_runs: null
      pause: false
      producer: ''
      reason: ''
      reset: false
      resume: false
"""
LAUNCHPAD = """query($job: String!) {
  runConfigSchemaOrError(selector: {
    pipelineName: $job, repositoryName: "__repository__", repositoryLocationName: "here"
  }) { ... on RunConfigSchema { rootDefaultYaml } }
}"""
PRESETS = """query($job: String!) {
  pipelineOrError(params: {
    pipelineName: $job, repositoryName: "__repository__", repositoryLocationName: "here"
  }) { ... on Pipeline { presets { runConfigYaml } } }
}"""
RESOURCES = """{
  allTopLevelResourceDetailsOrError(repositorySelector: {
    repositoryName: "__repository__", repositoryLocationName: "here"
  }) { ... on ResourceDetailsList { results { name configuredValues { key value } } } }
}"""


TYPES = """query($job: String!) {
  runConfigSchemaOrError(selector: {
    pipelineName: $job, repositoryName: "__repository__", repositoryLocationName: "here"
  }) { ... on RunConfigSchema { allConfigTypes { key ... on CompositeConfigType {
    fields { name description isRequired configType { key ... on WrappingConfigType { ofType { key } } } }
  } } } }
}"""


@pytest.fixture(scope="module")
def asked():
    origin = LoadableTargetOrigin(
        executable_path=sys.executable, module_name="definitions", working_directory=str(PROJECT)
    )
    target = InProcessWorkspaceLoadTarget(InProcessCodeLocationOrigin(origin, location_name="here"))
    with dg.DagsterInstance.local_temp() as instance, WorkspaceProcessContext(instance, target) as workspace:
        context, schema = workspace.create_request_context(), create_schema()

        def ask(query, **variables):
            result = asyncio.run(schema.execute_async(query, context_value=context, variable_values=variables))
            assert not result.errors, result.errors
            (answer,) = result.data.values()
            return answer

        yield ask


@pytest.mark.parametrize("job", ["pull", "retry", "replay"])
def test_it_opens_with_what_a_run_takes_on_and_no_resources(asked, job):
    assert asked(LAUNCHPAD, job=f"flights_{job}")["rootDefaultYaml"] == RECEIVE


def test_the_job_of_limits_opens_with_all_its_fields(asked):
    (preset,) = asked(PRESETS, job="flights_limits")["presets"]
    assert preset["runConfigYaml"] == LIMITS


def test_it_knows_the_fields_of_the_context_with_types_and_descriptions(asked):
    kinds = asked(TYPES, job="flights_pull")["allConfigTypes"]
    fields = {field["name"]: field for kind in kinds for field in kind.get("fields", ())}
    kinds = {name: fields[name]["configType"] for name in Rules.model_fields}
    declared = {name: kind.get("ofType", kind)["key"] for name, kind in kinds.items()}

    assert declared == {"cancelled_is_valid": "BoolSourceType", "alerts": "StringSourceType"}
    assert {name: fields[name]["description"] for name in Rules.model_fields} == {
        name: field.description for name, field in Rules.model_fields.items()
    }
    assert not any(fields[name]["isRequired"] for name in Rules.model_fields)


class Rich(BaseModel):
    """Fields of every type."""

    limit: int = 3
    since: date = date(2026, 1, 1)
    most: int | None = 5
    least: int | None = None
    names: set[str] = {"a"}
    places: Sequence[str] = ()
    pair: tuple[int, int] = (1, 2)
    raw: bytes = b"\xff"
    password: str = Field("hidden", repr=False)


class Enriched(Pipeline, abstract=True):
    """A pipeline whose runs change these fields."""

    context = Rich()


@pytest.mark.parametrize(
    "given",
    [
        *({}, {"limit": 4}, {"since": "2026-02-03"}, {"most": None}, {"most": 6}, {"least": 2, "limit": 0}),
        {"names": ["b"], "places": ["c"], "pair": [3, 4], "raw": "d", "password": "e"},
    ],
)
def test_a_run_gets_the_fields_that_are_given_and_no_others(given):
    seen = []
    configured = receive_config_of(Enriched)

    @dg.op
    def receive(config: configured):
        seen.append(config.overrides())

    @dg.job
    def receiving():
        receive()

    receiving.execute_in_process(run_config={"ops": {"receive": {"config": {"context": given}}}})

    assert seen == [given]


def test_a_field_without_repr_has_no_default_in_the_launchpad():
    (context,) = receive_config_of(Enriched).model_fields["context"].annotation.__mro__[:1]
    assert context.model_fields["password"].default is None
    assert context.model_fields["limit"].default == 3


class Without(Pipeline, abstract=True):
    """A pipeline without a context."""


@pytest.mark.parametrize("pipeline", [Enriched, Without])
def test_a_field_that_the_context_does_not_have_is_refused_before_a_run_starts(pipeline):
    configured = receive_config_of(pipeline)

    @dg.op
    def receive(config: configured):
        """Do nothing."""

    @dg.job
    def receiving():
        receive()

    given = {"ops": {"receive": {"config": {"context": {"limmit": 4}}}}}
    with pytest.raises(dg.DagsterInvalidConfigError, match="limmit"):
        receiving.execute_in_process(run_config=given)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (receive_config_of(Enriched), {"context": {"limit": {"env": "LIMIT"}}}),
        (receive_config_of(Enriched), {"producer": {"env": "PRODUCER"}}),
        (LimitsConfig, {"pause": True, "reason": {"env": "BANK_TOKEN"}}),
    ],
)
def test_a_variable_in_the_config_of_an_op_is_refused_and_its_value_is_not_shown(monkeypatch, kind, config):
    for name in ("LIMIT", "PRODUCER", "BANK_TOKEN"):
        monkeypatch.setenv(name, "42")
    with pytest.raises(PipelineError) as error:
        without_variables(kind, {"ops": {"change": {"config": config}}}, ("ops", "change", "config"))
    assert "42" not in str(error.value)


def test_resources_show_their_values_on_their_own_page(asked):
    shown = {resource["name"]: resource["configuredValues"] for resource in asked(RESOURCES)["results"]}

    assert {"key": "attempts", "value": "3"} in shown["acknowledger"]


@pytest.mark.parametrize(("given", "used"), [({}, "of_environment"), ({"url": "sqlite:////given"}, "given")])
def test_an_option_of_a_resource_holds_where_a_run_gives_it(monkeypatch, given, used):
    monkeypatch.setenv("CONTROL_URL", "sqlite:////of_environment")
    control, seen = ControlResource(url=dg.EnvVar("CONTROL_URL")), []
    out_of_launchpad(control)

    @dg.op(required_resource_keys={"control"})
    def look(context):
        seen.append(str(context.resources.control.url))

    @dg.job(resource_defs={"control": control})
    def looking():
        look()

    looking.execute_in_process(run_config={"resources": {"control": {"config": given}}} if given else {})

    assert seen == [f"sqlite:////{used}"]
