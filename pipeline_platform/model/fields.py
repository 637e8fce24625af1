"""The fields of a model: a pydantic model's, or those of a `msgspec.Struct`."""

import types
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from msgspec import Struct
from msgspec.structs import FieldInfo, asdict
from msgspec.structs import fields as fields_of_struct
from pydantic import BaseModel, PlainValidator

ModelClass = type[BaseModel] | type[Struct]
MODELS = (BaseModel, Struct)


def _model(model: object) -> ModelClass:
    if isinstance(model, type) and issubclass(model, MODELS):
        return model
    raise ValueError("it must be the class of a pydantic model or of a msgspec.Struct")


Schema = Annotated[ModelClass, PlainValidator(_model)]
"""As an option has it."""


class ModelField(NamedTuple):
    """A field of a model; `has_none` says that it may hold None, which a default of None allows, too."""

    annotation: Any
    is_required: bool
    has_none: bool
    of: Any

    def default(self, given: Mapping[str, Any]) -> Any:
        """What it holds where nothing is given; pydantic's factories may ask for what is given of other fields."""
        if not isinstance(self.of, FieldInfo):
            return self.of.get_default(call_default_factory=True, validated_data=dict(given))
        return self.of.default_factory() if callable(self.of.default_factory) else self.of.default


@lru_cache(maxsize=256)
def fields(model: ModelClass) -> Mapping[str, ModelField]:
    """The fields of a model, by name."""
    declared: list[tuple[str, Any, Any, bool]]
    if issubclass(model, BaseModel):
        given = model.model_fields.items()
        declared = [(name, one, one.rebuild_annotation(), one.is_required()) for name, one in given]
    else:
        declared = [(one.name, one, one.type, one.required) for one in fields_of_struct(model)]
    return {
        name: ModelField(type_, required, allows_none(type_) or (not required and one.default is None), one)
        for name, one, type_, required in declared
    }


def values_of(instance: BaseModel | Struct) -> Mapping[str, Any]:
    """What the fields of an instance hold; that of a pydantic model may hold more."""
    return instance.__dict__ if isinstance(instance, BaseModel) else asdict(instance)


def allows_none(annotation: Any) -> bool:
    """Whether a type includes None."""
    if get_origin(annotation) in (Annotated, Union, types.UnionType):
        return any(map(allows_none, get_args(annotation)))
    return annotation in (None, type(None), Any)
