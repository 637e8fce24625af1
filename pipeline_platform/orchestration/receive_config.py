"""Configuration of a receive in the launchpad."""

from enum import Enum
from typing import Any, get_args

import dagster as dg
from pydantic import Field, create_model

from pipeline_platform.model.pipeline import Pipeline

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
        return context.model_dump(exclude_unset=True) if isinstance(context, dg.Config) else context


def receive_config_of(pipeline: type[Pipeline]) -> type[ReceiveConfig]:
    """Return a `ReceiveConfig` with the fields of the pipeline's context.

    The fields have no defaults here: unset fields keep the value of the class. Dagster drops null for declared fields,
    so fields that null would change are not declared. A context with such a field accepts unknown names here, and the
    run refuses them.
    """
    fields = {} if pipeline.context is None else type(pipeline.context).model_fields
    own: dict[str, Any] = {
        name: (
            field.annotation | None if field.annotation in _PLAIN else Any,
            Field(None, description=field.description),
        )
        for name, field in fields.items()
        if type(None) not in get_args(field.annotation) or getattr(pipeline.context, name) is None
    }
    base = dg.Config if len(own) == len(fields) else dg.PermissiveConfig
    context = create_model(f"{pipeline.__name__}Context", __base__=base, **own)
    described = ReceiveConfig.model_fields["context"].description
    field: Any = (context, Field(default_factory=context, description=described))
    return create_model("ReceiveConfig", __base__=ReceiveConfig, __doc__=ReceiveConfig.__doc__, context=field)
