"""Fields of pydantic models and `msgspec.Struct` classes, in one form."""

import types
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from msgspec import Struct
from msgspec.structs import FieldInfo, asdict
from msgspec.structs import fields as fields_of_struct
from pydantic import BaseModel, Json, JsonValue

from pipeline_platform.model.strict_options import Requirement

ModelClass = type[BaseModel] | type[Struct]
MODELS = (BaseModel, Struct)
Schema = Annotated[
    ModelClass,
    Requirement(
        "a class of pydantic models or a msgspec.Struct class",
        is_valid=lambda model: isinstance(model, type) and issubclass(model, MODELS),
    ),
]
"""Type of the option `schema`."""


class ModelField(NamedTuple):
    """A field of a model.

    Attributes:
        annotation: Its type.
        is_required: Whether it has no default.
        has_none: Whether it may contain None: by its type, or by a default of None.
        of: The original, of pydantic or msgspec.
    """

    annotation: Any
    is_required: bool
    has_none: bool
    of: Any

    @property
    def description(self) -> str | None:
        """The description of pydantic's `Field` or of msgspec's `Meta`."""
        described = [self.of, *(get_args(self.annotation)[1:] if get_origin(self.annotation) is Annotated else ())]
        return next((text for each in described if (text := getattr(each, "description", None))), None)

    def default(self, given: Mapping[str, Any]) -> Any:
        """Return the default; pydantic's default factories may use the given values of other fields."""
        if not isinstance(self.of, FieldInfo):
            return self.of.get_default(call_default_factory=True, validated_data=dict(given))
        return self.of.default_factory() if callable(self.of.default_factory) else self.of.default


@lru_cache(maxsize=256)
def fields(model: ModelClass) -> Mapping[str, ModelField]:
    """Return the fields of a model, by name."""
    declared: list[tuple[str, Any, Any, bool]]
    if issubclass(model, BaseModel):
        given = model.model_fields.items()
        declared = [(name, field, field.rebuild_annotation(), field.is_required()) for name, field in given]
    else:
        declared = [(field.name, field, field.type, field.required) for field in fields_of_struct(model)]
    return {
        name: ModelField(type_, required, allows_none(type_) or (not required and field.default is None), field)
        for name, field, type_, required in declared
    }


def values_of(instance: BaseModel | Struct) -> Mapping[str, Any]:
    """Return the values of an instance by field; for a pydantic model the dict may contain more than its fields."""
    return instance.__dict__ if isinstance(instance, BaseModel) else asdict(instance)


def allows_none(annotation: Any) -> bool:
    """Whether a type includes None."""
    if get_origin(annotation) in (Annotated, Union, types.UnionType):
        return any(map(allows_none, get_args(annotation)))
    return annotation in (None, type(None), Any, Json, JsonValue)
