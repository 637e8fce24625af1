"""What the launchpad opens with, as GraphQL tells the UI, and what it takes all the same."""

import asyncio
import sys

import dagster as dg
import pytest
from dagster._core.remote_origin import InProcessCodeLocationOrigin
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import InProcessWorkspaceLoadTarget
from dagster_graphql.schema import create_schema

from pipeline_platform.orchestration import ControlResource
from pipeline_platform.orchestration.launchpad import out_of_launchpad
from tests.fixtures.keeper import PROJECT

RECEIVE = """\
ops:
  flights:
    ops:
      receive_messages:
        config:
          although_paused: false
"""
LAUNCHPAD = """query($job: String!) {
  runConfigSchemaOrError(selector: {
    pipelineName: $job, repositoryName: "__repository__", repositoryLocationName: "here"
  }) { ... on RunConfigSchema { rootDefaultYaml } }
}"""
RESOURCES = """{
  allTopLevelResourceDetailsOrError(repositorySelector: {
    repositoryName: "__repository__", repositoryLocationName: "here"
  }) { ... on ResourceDetailsList { results { name configuredValues { key value } } } }
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


@pytest.mark.parametrize("job", ["pull", "backfill", "replay"])
def test_it_opens_with_what_a_run_takes_on_and_no_resources(asked, job):
    assert asked(LAUNCHPAD, job=f"flights_{job}")["rootDefaultYaml"] == RECEIVE


def test_resources_show_their_values_on_their_own_page(asked):
    shown = {one["name"]: one["configuredValues"] for one in asked(RESOURCES)["results"]}

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
