"""The component of a `dg` project that defines a pipeline, and its scaffolder."""

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import click
import dagster as dg
import dotenv
from pydantic import BaseModel, Field, PrivateAttr

from pipeline_platform.connectors.new_pipeline import NewPipeline, SourceKind
from pipeline_platform.home import home
from pipeline_platform.model.pipeline import Pipeline, PipelineError
from pipeline_platform.orchestration.deployment import pipeline_definitions, resources_together
from pipeline_platform.orchestration.resources.default_resources import default_resources
from pipeline_platform.orchestration.resources.lake_resources import ControlResource, LakeResource
from pipeline_platform.orchestration.resources.sink_resources import sink_resource
from pipeline_platform.orchestration.resources.source_resources import source_resource
from pipeline_platform.orchestration.resources.spark_resource import SparkResource
from pipeline_platform.sinks.contract import Sink
from pipeline_platform.source.contract import Source


class NewComponent(BaseModel):
    """Options of `dg scaffold defs pipeline_platform.orchestration.PipelineComponent`, besides a name."""

    source: SourceKind = "table"


class PipelineScaffolder(dg.Scaffolder[NewComponent]):
    """Scaffolder that writes a pipeline's class, its test, and the `defs.yaml` with the class and its source."""

    @classmethod
    def get_scaffold_params(cls) -> type[NewComponent]:
        """Return the options of the command."""
        return NewComponent

    def scaffold(self, request: dg.ScaffoldRequest[NewComponent]) -> None:
        """Write the three files. For a table queue, also create its tables."""
        folder = request.target_path
        if request.scaffold_format != "yaml":
            folder.rmdir()
            raise click.UsageError("--format must be yaml for a pipeline. Remove the option.")
        project = dg.ComponentTree.for_project(folder)
        package = ".".join([project.defs_module_name, *folder.relative_to(project.defs_module_path).parts])
        try:
            made = NewPipeline(folder.name, request.params.source, package)
        except ValueError as error:
            folder.rmdir()
            raise click.BadParameter(str(error), param_hint="DEFS_PATH") from None
        dotenv.load_dotenv(project.project_root / ".env")
        (folder / f"{folder.name}.py").write_text(made.pipeline)
        (folder / f"test_{folder.name}.py").write_text(made.test)
        source = {"connector": f"{made.connector_module}.{made.connector}", "options": _in_yaml(made.options)}
        attributes = {"pipeline": f".{folder.name}.{made.class_name}", "sources": {made.key: source}}
        dg.scaffold_component(request, attributes)
        click.echo(made.make_ready())
        click.echo(f"Run its test: python -m pytest {os.path.relpath(folder)}")


def _in_yaml(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.replace("{home}", "{{ home }}") if isinstance(value, str) else value
        for name, value in options.items()
    }


_OPTIONS = "A value `{env: NAME}`, also within a value, is read from a variable, and Dagster hides it."


class SourceEntry(dg.Model):
    """A source in a `defs.yaml`."""

    connector: str = Field(description="Import path of the connector's class.")
    options: dict[str, Any] = Field(default_factory=dict, description=f"Options of the connector. {_OPTIONS}")


class SinkEntry(dg.Model):
    """A sink in a `defs.yaml`."""

    sink: str = Field(description="Import path of the sink's class.")
    options: dict[str, Any] = Field(default_factory=dict, description=f"Options of the sink. {_OPTIONS}")


def _imported(context: dg.ResolutionContext, path: str, base: type) -> Any:
    """Import the class at a path, which starts with a dot within the component's folder."""
    loading = dg.ComponentLoadContext.from_resolution_context(context)
    module, _, name = loading.normalize_component_type_str(path).rpartition(".")
    found = getattr(importlib.import_module(module), name, None)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise PipelineError(
            f"{path!r} is not a {base.__name__}. Give the class as <module>.<class>, or as .<file>.<class> in the "
            "component's folder"
        )
    return found


def _given(context: dg.ResolutionContext, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a resource, with `{env: NAME}` as `dg.EnvVar`."""
    return {name: _with_variables(value) for name, value in context.resolve_value(options).items()}


def _with_variables(value: Any) -> Any:
    if isinstance(value, dict):
        if list(value) == ["env"]:
            return dg.EnvVar(value["env"])
        return {key: _with_variables(item) for key, item in value.items()}
    return [_with_variables(item) for item in value] if isinstance(value, list) else value


def _sources(context: dg.ResolutionContext, sources: Mapping[str, SourceEntry]) -> dict[str, Any]:
    return {
        key: source_resource(_imported(context, source.connector, Source))(
            **{"name": key, **_given(context, source.options)}
        )
        for key, source in sources.items()
    }


def _sinks(context: dg.ResolutionContext, sinks: Mapping[str, SinkEntry]) -> dict[str, Any]:
    return {
        key: sink_resource(_imported(context, sink.sink, Sink))(**{"name": key, **_given(context, sink.options)})
        for key, sink in sinks.items()
    }


def _resource(kind: type[dg.ConfigurableResource[Any]]) -> dg.Resolver:
    """Return a resolver that builds a resource from its options."""
    return dg.Resolver(
        lambda context, options: kind(**_given(context, options)),
        model_field_type=dict[str, Any],
        description=f"Options of `{kind.__name__}` for the whole project. Default: from environment variables.",
    )


@dg.scaffold_with(PipelineScaffolder)
class PipelineComponent(dg.Component, dg.Model, dg.Resolvable):
    """A pipeline that pulls messages, handles them on Spark, and acknowledges them once their results are stored.

    All components of a project share the lake, the control store and Spark. One component may configure them.
    """

    pipeline: Annotated[
        type[Pipeline],
        dg.Resolver(
            lambda context, path: _imported(context, path, Pipeline),
            model_field_type=str,
            description="Import path of the class. It starts with a dot if the class is in the component's folder.",
        ),
    ]
    sources: Annotated[
        dict[str, Any],
        dg.Resolver(
            _sources,
            model_field_type=dict[str, SourceEntry],
            description="Sources by resource key: those that the pipeline pulls from, and the one for dead letters.",
        ),
    ]
    sinks: Annotated[
        dict[str, Any],
        dg.Resolver(
            _sinks,
            model_field_type=dict[str, SinkEntry],
            description="Sinks of the pipeline's batchers by resource key.",
        ),
    ] = Field(default_factory=dict)
    lake: Annotated[Any, _resource(LakeResource)] = None
    control: Annotated[Any, _resource(ControlResource)] = None
    spark: Annotated[Any, _resource(SparkResource)] = None
    _together: dict[str, Any] | None = PrivateAttr(default=None)

    @staticmethod
    @dg.template_var
    def home() -> str:
        """`{{ home }}`: the deployment's folder on this machine."""
        return str(home())

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Return the pipeline's definitions, with the resources of the project's pipelines.

        Raises:
            PipelineError: The project's pipelines are invalid together, or two components give a resource different
                options.
        """
        # Definitions with one key merge only if the resource is the very same: one component makes it for all.
        components = context.component_tree.get_all_components(PipelineComponent)
        first = components[0]
        if first._together is None:
            first._together = _shared(components)
        resources = first._together
        own = pipeline_definitions(self.pipeline, resources, given={}, named=())
        return dg.Definitions.merge(own, dg.Definitions(resources=resources))


def _shared(components: Sequence[PipelineComponent]) -> dict[str, Any]:
    resources: dict[str, Any] = {}
    owners: dict[str, str] = {}
    for component in components:
        project = {"lake": component.lake, "control": component.control, "spark": component.spark}
        named = [*component.sources.items(), *component.sinks.items(), *project.items()]
        name = component.pipeline.__qualname__
        for key, resource in named:
            if resource is None:
                continue
            if resources.setdefault(key, resource) != resource:
                raise PipelineError(
                    f"the components of {owners[key]} and {name} give the resource {key!r} different options. Remove "
                    "it from one of the two components, or rename a source or a sink"
                )
            owners.setdefault(key, name)
    return resources_together([component.pipeline for component in components], {**default_resources(), **resources})
