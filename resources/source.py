"""Any source as a Dagster resource: the connector's own options become the resource's configuration."""

from __future__ import annotations

import enum
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import dagster as dg
from dagster._config.pythonic_config import ConfigurableResourceFactory
from pydantic import Field, create_model

from pipeline_platform.source import Source


def source_resource(source: type[Source]) -> type[ConfigurableResourceFactory[Source]]:
    """Make a resource class of a connector: the same fields, with `dg.EnvVar` allowed wherever text is.

    Connectors are free of Dagster, because Spark tasks use them; this is what turns one into a resource::

        "flights_queue": source_resource(TableQueue)(name="flights_queue", url=dg.EnvVar("FLIGHTS_QUEUE"))

    Args:
        source: The connector.

    Returns:
        A resource that hands the connector to ops and sensors.
    """

    class _SourceResource(ConfigurableResourceFactory[source]):  # type: ignore[valid-type]
        def create_resource(self, context: dg.InitResourceContext) -> Source:
            del context
            # Only what was changed: to some connectors, a default that is given is a choice that can contradict.
            values = {name: getattr(self, name) for name in source.model_fields}
            return source(**{name: value for name, value in values.items() if not _is_default(source, name, value)})

    fields: dict[str, Any] = {
        name: (
            _configurable(field.annotation),
            Field(_default(field.default), description=field.description)
            if not field.is_required()
            else Field(description=field.description),
        )
        for name, field in source.model_fields.items()
    }
    made = create_model(f"{source.__name__}Resource", __base__=_SourceResource, __doc__=source.__doc__, **fields)
    return cast("type[ConfigurableResourceFactory[Source]]", made)


def _configurable(annotation: Any) -> Any:
    """The type that Dagster's configuration has for a field; the connector validates the value again."""
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return str
    kind, of = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        return _configurable(of[0])
    if kind is Literal:
        return type(of[0])
    if kind in (tuple, list):
        return list[_configurable(of[0])]  # type: ignore[misc]
    if kind in (Union, UnionType) and type(None) in of:
        (value,) = (each for each in of if each is not type(None))
        return _configurable(value) | None
    return annotation


def _default(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _is_default(source: type[Source], name: str, value: Any) -> bool:
    default = source.model_fields[name].default
    return bool(value == default or (isinstance(default, tuple) and list(default) == value))
