"""Messages are immutable: methods return new messages, and properties of the delivery are read-only."""

import enum
from typing import Annotated, Literal

import pytest
from pydantic import AliasChoices, AliasPath, BaseModel, Discriminator, Field, Tag, ValidationError

from pipeline_platform.model.failure import Failure, PayloadError, words
from pipeline_platform.model.message import Message
from tests.fixtures.small_lake import batch_of


@pytest.fixture
def message():
    return next(iter(Message.each(batch_of(b"1"))))


def test_a_new_message_is_ok_and_has_the_default_batcher(message):
    assert (message.data, message.status, message.reason) == (b"1", "ok", None)
    assert (message.batcher, message.batch_key, message.batch_mode) == ("default", "default", "bulk")


@pytest.mark.parametrize(
    ("change", "attribute", "value"),
    [
        (lambda m: m.put_data(2), "data", 2),
        (lambda m: m.put(2), "data", 2),
        (lambda m: m.put(2, batcher="lake"), "batcher", "lake"),
        (lambda m: m.put(2, batch_key="ключ"), "batch_key", "ключ"),
        (lambda m: m.update_data(lambda data: data + b"!"), "data", b"1!"),
        (lambda m: m.put_batcher("lake"), "batcher", "lake"),
        (lambda m: m.put_batch_key("ключ"), "batch_key", "ключ"),
        (lambda m: m.put_batch_mode("flush"), "batch_mode", "flush"),
        (lambda m: m.failed("no"), "reason", "no"),
        (lambda m: m.configure_ack(on_failure="nack:30"), "actions", (None, "nack:30")),
    ],
)
def test_each_method_returns_a_new_message_and_leaves_the_old_one(message, change, attribute, value):
    before = getattr(message, attribute)
    changed = change(message)
    assert getattr(changed, attribute) == value
    assert getattr(message, attribute) == before
    assert message.is_same(changed), "it is still this message, made by its methods"


def test_messages_of_other_rows_or_other_batches_are_not_the_same():
    first, second = Message.each(batch_of(b"1", b"2"))
    (copy,) = Message.each(batch_of(b"1"))
    assert not first.is_same(second)
    assert not first.is_same(copy), "the same row of another batch is another message"
    assert not first.is_same(None)


def test_properties_of_the_delivery_are_read_only(message):
    assert (message.source, message.message_id, message.attempt, message.metadata) == ("memory", "m0", 1, {})
    assert message.window == "2026-01-01T0000"
    assert message.received_at.isoformat() == "2026-01-01T00:00:00+00:00"
    with pytest.raises(AttributeError):
        message.message_id = "other"


@pytest.mark.parametrize("attribute", ["batch_mode", "failure", "actions"])
def test_attributes_with_a_method_cannot_be_set(message, attribute):
    with pytest.raises(AttributeError, match=attribute):
        setattr(message, attribute, None)


class Urgency(enum.StrEnum):
    NOW = "flush"


class Action(enum.StrEnum):
    NONE = "noop"


def test_a_subclass_of_str_for_a_mode_or_an_action_becomes_a_str(message):
    told = message.put_batch_mode(Urgency.NOW).configure_ack(on_success=Action.NONE)
    assert (type(told.batch_mode), told.batch_mode) == (str, "flush")
    assert (type(told.actions[0]), told.actions) == (str, ("noop", None))


def test_configure_ack_keeps_an_action_that_is_not_given(message):
    configured = message.configure_ack(on_success="noop").configure_ack(on_failure="nack")
    assert configured.actions == ("noop", "nack")


@pytest.mark.parametrize("action", ["reject", "nack:", "nack:-1", "nack:soon", 5])
def test_an_invalid_action_is_refused_with_the_valid_actions(message, action):
    with pytest.raises(ValueError, match=r"'ack', 'noop', 'nack' or 'nack:<seconds>' \(up to 999,999\)"):
        message.configure_ack(on_failure=action)


def test_an_invalid_batch_mode_is_refused(message):
    with pytest.raises(ValueError, match="'bulk' or 'flush', got 'fast'"):
        message.put_batch_mode("fast")


def test_a_batch_key_must_be_a_str(message):
    for put in (message.put_batch_key, lambda key: message.put(2, batch_key=key)):
        with pytest.raises(TypeError, match=r"batch_key must be a str, got 5\. Convert it with str"):
            put(5)


def test_put_keeps_a_batcher_and_a_key_that_are_not_given(message):
    routed = message.put_batcher("lake").put_batch_key("DL")
    assert (routed.put(2).batcher, routed.put(2).batch_key) == ("lake", "DL")


def test_a_failure_has_kind_reason_traceback_and_stage():
    try:
        raise KeyError("carrier")
    except KeyError as error:
        failure = Failure.of(error, "handle_message")
    assert (failure.kind, failure.reason, failure.stage) == ("KeyError", "'carrier'", "handle_message")
    assert "test_a_failure_has" in failure.traceback


def test_the_reason_of_an_exception_without_text_is_its_class():
    assert Failure.of(ValueError(), "transform").reason == "ValueError"


class SpeechlessError(Exception):
    def __str__(self):
        raise self.args[0]


@pytest.mark.parametrize("cause", [RuntimeError, SystemExit])
def test_an_exception_whose_str_raises_has_a_reason(cause):
    told = Failure.of(SpeechlessError(cause()), "transform").reason
    assert told == f"<SpeechlessError, whose __str__ raised {cause.__name__}>"


class Stop(BaseModel):
    name: str


class Fare(BaseModel, extra="forbid"):
    price: int
    by_zone: dict[int, str] = {}
    stops: list[Stop] = []


def refusal(payload: bytes) -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        Fare.model_validate_json(payload)
    return caught.value


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b'{"price": "SECRET"}', "Fare: price: Input should be a valid integer, unable to parse string as an integer"),
        (b'{"price": 1, "SECRET": 2}', "Fare: *: Extra inputs are not permitted"),
        (
            b'{"price": 1, "by_zone": {"SECRET": ""}}',
            "Fare: by_zone.*.[key]: Input should be a valid integer, unable to parse string as an integer",
        ),
        (
            b'{"price": 1, "stops": [{"name": "a"}, {"name": ["SECRET"]}]}',
            "Fare: stops.*.name: Input should be a valid string",
        ),
        (b'{"price": 1, "SECRET', "Fare: Invalid JSON: EOF while parsing a string at line 1 column 20"),
        (b"{}", "Fare: price: Field required"),
    ],
)
def test_the_reason_of_a_validation_error_has_place_and_rule_and_no_payload(payload, reason):
    error = refusal(payload)
    failure = Failure.of(error, "handle_message")
    assert (failure.kind, failure.reason) == ("ValidationError", reason)
    assert failure.traceback.rstrip().endswith(reason), "frames, and the same words"
    assert "in refusal" in failure.traceback
    assert "SECRET" not in "".join(failure[:4])


def test_the_reason_of_many_validation_errors_is_cut():
    stops = ",".join(['{"name": 5}'] * 1_000)
    reason = Failure.of(refusal(b'{"price": 1, "stops": [%s]}' % stops.encode()), "handle_message").reason
    assert reason.count("stops.*.name") == 5
    assert reason.endswith("; and 995 more")


def test_a_validation_error_quoted_by_another_exception_has_no_payload(message):
    refused = refusal(b'{"price": "SECRET"}')
    try:
        raise RuntimeError(f"no fare: {refused}") from refused
    except RuntimeError as error:
        failure, failed = Failure.of(error, "handle_message"), message.failed(error)
    assert failure.reason.startswith("no fare: Fare: price: Input should be")
    assert failed.reason == failure.reason
    assert "SECRET" not in "".join([*failure[:4], *failed.failure[:4]])


class Bus(BaseModel):
    kind: Literal["bus"]
    seats: dict[str, int] = {}
    fares: list[Fare] = Field([], validation_alias="prices")


class Train(BaseModel):
    kind: Literal["train"]


class Trip(BaseModel):
    leg: Annotated[Bus | Train, Field(discriminator="kind")] = Train(kind="train")
    note: int | list[int] = 0
    type: Annotated[int, Field(gt=0)] | list["Trip"] = 1
    city: str = Field("", validation_alias=AliasPath("address", "town"))
    other: str = Field("", validation_alias=AliasChoices("place", AliasPath("places", 0, "town-name")))
    fare: Annotated[
        Annotated[Fare, Tag("by-car")] | Annotated[Bus, Tag("by-bus")], Discriminator(lambda value: "by-car")
    ] = Fare(price=1)
    sizes: dict[str, Annotated[int, {"unit": "m"}]] = {}


@pytest.mark.parametrize(
    ("payload", "place"),
    [
        (b'{"leg": {"kind": "SECRET"}}', "Trip: leg: Input tag '*'"),
        (b'{"leg": {"kind": "bus", "seats": {"SECRET": "x"}}}', "Trip: leg.bus.seats.*: "),
        (b'{"leg": {"kind": "bus", "prices": [{"price": 1, "SECRET": 2}]}}', "Trip: leg.bus.prices.*.*: "),
        (b'{"leg": {"kind": "bus", "prices": [{"price": "SECRET"}]}}', "Trip: leg.bus.prices.*.price: "),
        (b'{"note": "SECRET"}', "Trip: note.int: "),
        (b'{"note": ["SECRET"]}', "; note.list[int].*: "),
        (b'{"type": [{"type": "SECRET"}]}', "Trip: type.constrained-int: "),
        (b'{"type": [{"type": "SECRET"}]}', "; type.list[Trip].*.type.constrained-int: "),
        (b'{"address": {"town": 1, "SECRET": 1}}', "Trip: address.town: "),
        (b'{"places": [{"town-name": 1}]}', "Trip: places.*.town-name: "),
        (b'{"fare": {"price": "SECRET"}}', "Trip: fare.by-car.price: "),
        (b'{"sizes": {"SECRET[int]": "x"}}', "Trip: sizes.*: "),
    ],
)
@pytest.mark.parametrize("decode", [Message.json, lambda message, model: framed(message).json_schema(model)])
def test_the_reason_of_a_payload_has_only_names_of_the_model(message, payload, place, decode):
    with pytest.raises((ValidationError, PayloadError)) as refused:
        decode(message.put_data(payload), Trip)
    failure = Failure.of(refused.value, "handle_message")
    assert place in failure.reason
    assert "SECRET" not in "".join(failure[:4])


def framed(message: Message) -> Message:
    return message.put_data(b"\0\0\0\0\1" + message.data)


def test_the_traceback_of_a_group_has_no_payload():
    error = ExceptionGroup("two", [ExceptionGroup("inner", [refusal(b'{"price": "SECRET"}')]), ValueError("other")])
    try:
        raise error
    except ExceptionGroup as group:
        failure = Failure.of(group, "handle_message")
    assert "Fare: price: Input should be a valid integer" in failure.traceback
    assert "SECRET" not in failure.traceback
    assert error.exceptions[0].__traceback__ is None


def test_the_reason_of_a_skip_has_no_payload(message):
    assert "SECRET" not in message.skip(refusal(b'{"price": "SECRET"}')).reason
    assert message.skip(ValueError()).reason == "ValueError"


def test_exceptions_with_circular_causes_have_a_reason():
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert Failure.of(first, "transform").reason == "first"


def test_words_of_any_value_fit_a_column():
    assert words("half \ud83d a surrogate") == "half \\ud83d a surrogate"
    assert len(words("x" * 10_000, 300)) == 300


def test_the_repr_of_a_message_has_no_payload(message):
    assert repr(message.put_data("secret")) == "Message('m0', batcher='default', status='ok')"
