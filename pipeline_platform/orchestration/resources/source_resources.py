"""Sources and the acknowledger as Dagster resources; a connector's own options become its resource's configuration."""

import enum
import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import PurePath
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import dagster as dg
from pydantic import BaseModel, Field, create_model
from pydantic.fields import FieldInfo

from pipeline_platform.orchestration.resources.addresses import QUIET
from pipeline_platform.orchestration.resources.lake_resources import values_of
from pipeline_platform.source.contract import Source
from pipeline_platform.tasks.acknowledge.acknowledger import Acknowledger

_CONNECTORS: dict[type, type[Source]] = {}
"""By the class of their resources."""

_LOOKED_AT: dict[tuple[type[Source], str], Source] = {}
"""Sources that sensors and checks of this process look at, by their options."""


@functools.cache  # of one class, so that resources with the same options are equal
def source_resource(source: type[Source]) -> type[dg.ConfigurableResource[Source]]:
    """Make a resource class of a connector: the same fields, with `dg.EnvVar` allowed for every text.

    Connectors are free of Dagster, because Spark tasks use them. This makes a resource of one::

        "flights_queue": source_resource(TableQueue)(name="flights_queue", url=dg.EnvVar("FLIGHTS_QUEUE"))

    Args:
        source: The connector.

    Returns:
        A resource that hands the connector to ops and sensors.
    """
    fields = source.model_fields

    class _SourceResource(dg.ConfigurableResource[Source]):
        model_config = QUIET

        def create_resource(self, context: dg.InitResourceContext) -> Source:
            # Defaults are left out: to some connectors, an option that is given can contradict another.
            values = {name: getattr(self, name) for name in fields}
            given = {name: value for name, value in values.items() if value != _default(fields[name])}
            made = source(**given)
            # A sensor looks every few seconds: what it opened, the next look uses again.
            return made if context.run else _LOOKED_AT.setdefault((source, repr(given)), made)

        @contextmanager
        def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator[Source]:
            made = self.create_resource(context)
            yield made
            if context.run:
                made.close()

    configured: dict[str, Any] = {
        name: (_configurable(field.annotation), Field(_default(field), description=field.description, repr=field.repr))
        for name, field in fields.items()
    }
    made = create_model(f"{source.__name__}Resource", __base__=_SourceResource, __doc__=source.__doc__, **configured)
    _CONNECTORS[made] = source
    return cast("type[dg.ConfigurableResource[Source]]", made)


def resource_of(source: Source) -> dg.ConfigurableResource[Source]:
    """Make a resource of a connector that has its options already."""
    options = {name: _as_configured(getattr(source, name)) for name in source.model_fields_set}
    return source_resource(type(source))(**options)


def connector_of(resource: Any) -> type[Source] | None:
    """The connector that `source_resource` made a resource of; None for another resource."""
    return _CONNECTORS.get(type(resource))


def places_of(resource: Any) -> frozenset[str]:
    """What a resource's source reads; empty where a variable is not set, or the source refuses its options."""
    connector = connector_of(resource)
    if connector is None or connector.places is Source.places:
        return frozenset()
    fields, values = connector.model_fields, values_of(resource)
    with suppress(Exception):  # of a class of the project's own, too: the run says what is wrong
        return connector(**{name: values[name] for name in fields if values[name] != _default(fields[name])}).places
    return frozenset()


def source_of(resources: Any, key: str) -> Source:
    """The source of that key, ready to be looked at by a sensor or a check."""
    source: Source = getattr(resources, key)
    source.open(resources.control)
    return source


def _configurable(annotation: Any) -> Any:
    """The type that Dagster's configuration has for a field; the connector validates the value again."""
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
        values = [each for each in of if each is not type(None)]
        return _configurable(values[0]) | None if len(values) == 1 else annotation
    return annotation


def _default(field: FieldInfo) -> Any:
    """A field's default as Dagster's configuration writes it; pydantic's `Undefined` for a required field."""
    return _as_configured(field.get_default(call_default_factory=True, validated_data={}))


def _as_configured(value: Any) -> Any:
    """A field's value as Dagster's configuration writes it."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, BaseModel):
        return value.model_dump()
    return list(value) if isinstance(value, tuple) else value


class AcknowledgerResource(dg.ConfigurableResource[Acknowledger]):
    """Acknowledges what is decided and published, grouped by `ack_ref`.

    One group's error never holds back another. What a source refuses is asked again, then reported and kept for the
    next run: it is never dropped.
    """

    model_config = QUIET

    attempts: int = Field(default=3, ge=1, description="How often a run tries to acknowledge what a source refuses.")
    wait_s: float = Field(default=1.0, ge=0, description="Seconds before it is asked again, doubled each time.")

    def create_resource(self, context: dg.InitResourceContext) -> Acknowledger:
        """Hand out the acknowledger."""
        return Acknowledger(self.attempts, self.wait_s)
