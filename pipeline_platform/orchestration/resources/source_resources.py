"""Sources and the acknowledger as Dagster resources. Options of a connector become config of its resource."""

import enum
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import PurePath
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

import dagster as dg
from pydantic import BaseModel, Field, create_model
from pydantic.fields import FieldInfo

from pipeline_platform.orchestration.resources.addresses import QUIET
from pipeline_platform.orchestration.resources.lake_resources import resource_options
from pipeline_platform.source.contract import Source
from pipeline_platform.tasks.acknowledge.acknowledger import Acknowledger

_LOOKED_AT: dict[tuple[type[Source], str], Source] = {}
"""Open sources of sensors and checks, by their options: Dagster creates new resources for each tick."""


@functools.cache  # resources of the same class with the same options are equal
def source_resource(source: type[Source]) -> type[dg.ConfigurableResource[Source]]:
    """Return a resource class for a connector, with the same fields. Text options accept a `dg.EnvVar`.

    Connectors do not import Dagster, because Spark tasks use them. Example::

        "flights_queue": source_resource(TableQueue)(name="flights_queue", url=dg.EnvVar("FLIGHTS_QUEUE"))

    Args:
        source: The connector.

    Returns:
        A resource class that provides the connector to ops and sensors.
    """

    class _SourceResource(dg.ConfigurableResource[Source]):
        model_config = QUIET
        connector_class: ClassVar[type[Source]] = source

        def create_resource(self, context: dg.InitResourceContext) -> Source:
            given = given_options(self, source)
            made = source(**given)
            # A sensor ticks every few seconds and reuses the source that an earlier tick opened.
            return made if context.run else _LOOKED_AT.setdefault((source, repr(given)), made)

        @contextmanager
        def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator[Source]:
            made = self.create_resource(context)
            yield made
            if context.run:
                made.close()

    return resource_class(source, _SourceResource)


def resource_class(kind: type[BaseModel], base: type[Any]) -> type[Any]:
    """Return a subclass of a resource that has the options of a connector or a sink as fields."""
    fields: dict[str, Any] = {
        name: (_configurable(field.annotation), Field(_default(field), description=field.description, repr=field.repr))
        for name, field in kind.model_fields.items()
    }
    return create_model(f"{kind.__name__}Resource", __base__=base, __doc__=kind.__doc__, **fields)


def given_options(resource: Any, kind: type[BaseModel]) -> dict[str, Any]:
    """Return the options of a resource without defaults: some connectors refuse an option together with another."""
    return _without_defaults({name: getattr(resource, name) for name in kind.model_fields}, kind)


def _without_defaults(values: Mapping[str, Any], kind: type[BaseModel]) -> dict[str, Any]:
    return {name: values[name] for name, field in kind.model_fields.items() if values[name] != _default(field)}


def configured(item: BaseModel) -> dict[str, Any]:
    """Return the options that are set of a connector or a sink, for its resource."""
    return {name: _as_configured(getattr(item, name)) for name in item.model_fields_set}


def connector_of(resource: Any) -> type[Source] | None:
    """Return the connector of a resource of `source_resource`; None for another resource."""
    return getattr(type(resource), "connector_class", None)


def places_of(resource: Any) -> frozenset[str]:
    """Return the places that a source reads; empty if a variable is not set or an option is invalid."""
    connector = connector_of(resource)
    if connector is None or connector.places is Source.places:
        return frozenset()
    with suppress(Exception):  # the run reports the error; connectors of the project may raise anything
        return connector(**_without_defaults(resource_options(resource), connector)).places
    return frozenset()


def source_of(resources: Any, key: str) -> Source:
    """Return the source with a key, opened for a sensor or a check."""
    source: Source = getattr(resources, key)
    source.open(resources.control)
    return source


def _configurable(annotation: Any) -> Any:
    """Return the type of a field in Dagster's config. The connector validates the value again."""
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum | PurePath):
        return str
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return dict[str, Any]
    kind, of = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        return _configurable(of[0])
    if kind is Literal:
        return type(of[0])
    if kind in (tuple, list):
        return list[_configurable(of[0])]  # type: ignore[misc]
    if kind in (Union, UnionType) and type(None) in of:
        values = [kind for kind in of if kind is not type(None)]
        return _configurable(values[0]) | None if len(values) == 1 else annotation
    return annotation


def _default(field: FieldInfo) -> Any:
    """Return a field's default for Dagster's config; pydantic's `Undefined` for a required field."""
    return _as_configured(field.get_default(call_default_factory=True, validated_data={}))


def _as_configured(value: Any) -> Any:
    """Return a field's value for Dagster's config."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, BaseModel):
        return value.model_dump()
    return list(value) if isinstance(value, tuple) else value


class AcknowledgerResource(dg.ConfigurableResource[Acknowledger]):
    """Acknowledger of decided and published messages, grouped by `ack_ref`.

    An error in one group does not delay the others. Refused acknowledgements are retried, then reported and left to the
    next run. They are never dropped.
    """

    model_config = QUIET

    attempts: int = Field(
        default=3, ge=1, description="Attempts of a run to acknowledge a message that the source refuses."
    )
    wait_s: float = Field(
        default=1.0, ge=0, description="Seconds before the second attempt. Doubles after each attempt, up to an hour."
    )

    def create_resource(self, context: dg.InitResourceContext) -> Acknowledger:
        """Return the acknowledger."""
        return Acknowledger(self.attempts, self.wait_s)
