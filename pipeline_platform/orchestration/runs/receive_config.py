"""Configuration of a receive in the launchpad."""

from collections.abc import Sequence
from enum import Enum
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import dagster as dg
from pydantic import Field, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.strict_options import PipelineError

_C = TypeVar("_C", bound=dg.Config)
_PLAIN = (bool, int, float, str)
"""Types that the launchpad checks. A field of another type accepts any value here, and the run validates it."""


class RunOrigin(Enum):
    """Origin of a run's messages."""

    source = "source"
    failed = "failed"
    messages = "messages"


class ReceiveConfig(dg.Config):
    """Messages that a run receives. If the config is empty, the job or the selected assets decide.

    A job sets its origin by a tag: Dagster accepts no config for backfills of a job that has config.
    """

    origin: RunOrigin | None = Field(
        default=None,
        description="`source` pulls messages. `failed` retries the open failures of the windows. `messages` replays "
        "all messages of the windows, and the new rows replace the old rows. Default: the origin of the job; without a "
        "job, `failed` if only the asset `failed` is selected, else `source`.",
    )
    demand: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of messages to receive. Default: the limit of a run. A replay ignores it.",
    )
    context: dict[str, Any] = Field(default_factory=dict, description="Fields of the pipeline's context to change.")
    ignore_pause: bool = Field(
        default=False,
        description="Receive messages even if the pipeline is paused. By default, a run of a paused pipeline receives "
        "nothing.",
    )
    rounds: bool | None = Field(
        default=None,
        description="Continue in rounds after the first receive, until no message has arrived for the producer's "
        "`idle_timeout`. The producer's sensor sets it.",
    )
    producer: str | None = Field(
        default=None,
        description="Name of the producer to pull from, if the pipeline has several. Default: the producer in the "
        "run's tags. Retries and replays cover all producers.",
    )
    failures: dict[str, Any] = Field(
        default_factory=dict,
        description="Open failures to retry, if the origin is `failed`: `state` (`open`: all; `waiting`: not dead; "
        "`due`: their retry is due; `dead`), `kind`, `reason` (a part of it), `cause`, `source`, `message_id`, "
        "`failed_before` (a time). Default: all.",
    )

    def overrides(self) -> dict[str, Any]:
        """Return the fields of the context that are set."""
        context: Any = self.context
        fields: dict[str, Any] = context.model_dump(exclude_unset=True)
        return fields


def without_variables(kind: type[_C], run_config: Any, path: Sequence[str]) -> _C:
    """Return the config of an op from the config of a run, by its path.

    Dagster would also copy variables of the environment into it, which the run config, logs and tables could then show.

    Raises:
        PipelineError: A value is not valid, for example because it is a variable.
    """
    config = run_config
    for key in path:
        config = (config or {}).get(key)
    try:
        return kind(**(config or {}))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise PipelineError(
            f"The config of {path[-2]} is not valid: {'.'.join(map(str, first['loc']))}: {first['msg']}. Set plain "
            "values; variables ({env: NAME}) are not supported here"
        ) from None


def receive_config_of(pipeline: type[Pipeline]) -> type[ReceiveConfig]:
    """Return a `ReceiveConfig` with the fields of the pipeline's context; the launchpad refuses other fields.

    Dagster leaves out a value that is equal to the default, so that a run contains only the fields that were changed.
    """
    fields = {} if pipeline.context is None else type(pipeline.context).model_fields
    own: dict[str, Any] = {name: _declared(field, getattr(pipeline.context, name)) for name, field in fields.items()}
    context = create_model(f"{pipeline.__name__}Context", __base__=dg.Config, **own)
    described = ReceiveConfig.model_fields["context"].description
    field: Any = (context, Field(default_factory=context, description=described))
    return create_model("ReceiveConfig", __base__=ReceiveConfig, __doc__=ReceiveConfig.__doc__, context=field)


def _declared(field: FieldInfo, value: Any) -> tuple[Any, Any]:
    """Return the type and the declaration of a field of the context. `value` is its value in the pipeline's class.

    The launchpad writes defaults into the config. A value that may differ in the process of a run, for example because
    it is read from a variable, is therefore not a default, unless the field may be null: Dagster drops a null that is
    equal to the default, so a run could not set the field to null.
    """
    kinds = {*get_args(field.annotation)} if get_origin(field.annotation) in (Union, UnionType) else {field.annotation}
    is_fixed = field.default_factory is None and value == field.default
    # `repr=False` is for secrets.
    is_shown = value is not None and field.repr and (is_fixed or type(None) in kinds)
    kind: Any = field.annotation if len(kinds - {type(None)}) == 1 and kinds & {*_PLAIN} else Any
    try:
        default = to_jsonable_python(value, fallback=str, inf_nan_mode="strings") if is_shown else None
    except ValueError:  # for example bytes that are not UTF-8
        default, is_shown = None, False
    return kind if is_shown else kind | None, Field(default, description=field.description)
