"""Methods of a message that decode Avro, Protobuf and JSON in Confluent's wire format."""

from __future__ import annotations

from typing import Any, TypeVar, overload

from pipeline_platform.model.formats import avro, protobuf, wire_format
from pipeline_platform.model.formats.wire_format import Registry

Model = TypeVar("Model")


class MessageFormats:
    """Decoders of the payload, `data`. The reason of an error names the id of the schema, and quotes no payload.

    A model is a pydantic model, a `msgspec.Struct`, or a type that one of these libraries accepts: `A | B`; `dict` for
    plain values.
    """

    __slots__ = ()

    data: Any

    @overload
    def avro(self, model: type[Model], schema: str | Registry) -> Model: ...

    @overload
    def avro(self, model: Any, schema: str | Registry) -> Any: ...

    def avro(self, model: Any, schema: str | Registry) -> Any:
        """Decode an Avro payload to an instance of a model.

        Args:
            model: See the class.
            schema: A `SchemaRegistry` for payloads in Confluent's wire format. For payloads without a header, the
                schema as JSON text.

        Raises:
            PayloadError: The payload has no header or is not Avro of its schema, or the model refuses its values.
            UnknownSchemaError: The registry has no schema with the payload's id.
            RunError: The registry cannot be used. No message fails: the run fails, and a later run handles them.
            TypeError: A callback has replaced `data`, which must be bytes; or an argument has the wrong type.
            ValueError: The text is not a valid Avro schema.
        """
        return avro.decoder(model, schema)(self.data)

    @overload
    def protobuf(self, model: type[Model], generated: Any = None, registry: Registry | None = None) -> Model: ...

    @overload
    def protobuf(self, model: Any, generated: Any = None, registry: Registry | None = None) -> Any: ...

    def protobuf(self, model: Any, generated: Any = None, registry: Registry | None = None) -> Any:
        """Decode a Protobuf payload, in Confluent's wire format or without a header.

        Args:
            model: The class that protoc generated, for an instance of it; or a model, see the class.
            generated: With a model: the class that protoc generated.
            registry: A `SchemaRegistry`. A payload must then have a header, and be of the message type of the generated
                class. Without it, another message type may be decoded to wrong values.

        Raises:
            PayloadError: The payload is not of this class, or the model refuses its values.
            UnknownSchemaError, RunError: As for `avro`.
            TypeError: A callback has replaced `data`, which must be bytes; or an argument has the wrong type.
        """
        return protobuf.decoder(model, model if generated is None else generated, registry)(self.data)

    @overload
    def json_schema(self, model: type[Model]) -> Model: ...

    @overload
    def json_schema(self, model: Any) -> Any: ...

    def json_schema(self, model: Any) -> Any:
        """Decode JSON in Confluent's wire format, by the rules of `json(model)`. The registry is not needed.

        Raises:
            PayloadError: The payload has no header or is not valid JSON, or the model refuses its values.
            TypeError: A callback has replaced `data`, which must be bytes; or neither pydantic nor msgspec accepts the
                type.
        """
        return wire_format.json_decoder(model)(self.data)
