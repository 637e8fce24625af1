"""Resources whose options are optional in the launchpad, and not listed there.

Uses a private class of Dagster 1.13.27. If a later Dagster has no such class, the launchpad lists all options.
"""

import copy
from typing import Any

import dagster as dg

try:
    from dagster._core.definitions.definition_config_schema import ConfiguredDefinitionConfigSchema
except ImportError:  # pragma: no cover - of a later Dagster
    ConfiguredDefinitionConfigSchema = None  # type: ignore[assignment, misc]


def out_of_launchpad(resource: Any) -> None:
    """Remove a resource's options from the initial config of the launchpad. A run may still set them.

    A run sets plain values only. `{env: NAME}` is refused: it would copy any variable into any option, and an error
    could then write the value to the event log.
    """
    if ConfiguredDefinitionConfigSchema is None or not isinstance(resource, dg.ConfigurableResource):
        return
    definition = resource.get_resource_definition()  # the same at each call
    bound = copy.copy(definition)
    field = bound.get_config_field()
    if isinstance(definition.config_schema, ConfiguredDefinitionConfigSchema) or not field.default_provided:
        return
    values, kind = field.default_value, field.config_type
    assert isinstance(kind, dg.Shape)
    options = {
        name: dg.Field(_plain(option.config_type), is_required=False, description=option.description)
        for name, option in kind.fields.items()
    }

    class Bound(ConfiguredDefinitionConfigSchema):
        default_provided = True
        default_value_as_json_str = field.default_value_as_json_str  # the page of resources shows it

    schema = dg.ResourceDefinition(lambda _: None, options).config_schema
    definition._config_schema = Bound(bound, schema, lambda given: {**values, **given})


_PLAIN: dict[Any, Any] = {dg.StringSource: str, dg.IntSource: int, dg.BoolSource: bool}


def _plain(kind: Any) -> Any:
    """Return a config type without variables."""
    if isinstance(kind, dg.Noneable | dg.Array):
        return type(kind)(_plain(kind.inner_type))
    if isinstance(kind, dg.Map):
        return dg.Map(kind.key_type, _plain(kind.inner_type))  # type: ignore[no-untyped-call]
    return _PLAIN.get(kind, kind)
