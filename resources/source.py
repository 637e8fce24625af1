"""Any source as a Dagster resource: the connector's own options become the resource's configuration."""

from __future__ import annotations

import enum
from typing import Any, cast

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
            return source(**{name: getattr(self, name) for name in source.model_fields})

    fields: dict[str, Any] = {
        name: (
            _configurable(field.annotation),
            Field(field.default, description=field.description)
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
    return annotation
