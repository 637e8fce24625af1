"""Options of every source: strict numbers, and errors without secrets."""

from datetime import datetime
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from pipeline_platform.model.safe_text import redacted, secrets_in
from pipeline_platform.source.clients import CLIENTS, per_process
from pipeline_platform.source.errors import SourceAwayError, SourceError


class SourceOptions(BaseModel):
    """Options of a source. Unknown options are refused, and instances are immutable."""

    # An error must not quote the other options, which may contain a password.
    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, allow_inf_nan=False, ignored_types=(per_process,)
    )

    name: str = Field(description="Name of the source, which is part of every message's identity: never change it.")

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_numbers(cls, value: Any, field: ValidationInfo) -> Any:
        """Refuse booleans for numbers: pydantic accepts True as 1."""
        annotation = cls.model_fields[str(field.field_name)].annotation
        kinds = {annotation, *get_args(annotation)}
        if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
            raise ValueError(f"must be a number, got {value}. Correct it.")
        return value

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        if not name or name != name.strip() or not name.isprintable():
            raise ValueError(
                f"must be non-empty text without control characters or surrounding spaces, got {name!r}. Correct it."
            )
        return name

    @property
    def secrets(self) -> list[str]:
        """Values that no error may contain: of fields with `repr=False`; of a URL only its password and parameters."""
        hidden = [name for name, field in type(self).model_fields.items() if not field.repr]
        return [secret for name in hidden for secret in secrets_in(getattr(self, name))]

    def __copy__(self) -> Self:
        """Return a copy without clients: `model_copy` may give it another address."""
        copied = super().__copy__()
        vars(copied).pop(CLIENTS, None)
        return copied

    def error(self, problem: str, *, away: bool = False) -> SourceError:
        """Return an error with the name of the source, and without its secrets. Raise it `from None`: causes are shown.

        Args:
            problem: The option or object, the value and the fix.
            away: Whether the server is unavailable, so that the operation may be retried.
        """
        kind = SourceAwayError if away else SourceError
        return kind(redacted(f"source {self.name!r}: {problem}", self.secrets))


def host(name: str | None) -> str:
    """Return a host name in canonical form, for `Source.places`."""
    lower = (name or "localhost").lower().strip("[]")
    return "localhost" if lower in ("127.0.0.1", "::1") else lower


def time_of_start(option: str, words: tuple[str, str], prefix: str) -> float | None:
    """Return the time of an option that is one of two words or `prefix:<time>`, in seconds; None for a word.

    Raises:
        ValueError: The option is not valid.
    """
    if option in words:
        return None
    word, _, text = option.partition(":")
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = None
    if word != prefix or time is None or time.tzinfo is None:
        raise ValueError(
            f"must be {', '.join(words)} or {prefix}:<ISO 8601 with a time zone>, as in "
            f"{prefix}:2026-01-31T00:00:00Z, got {option!r}. Correct it."
        )
    return time.timestamp()
