"""What a run takes on, as the launchpad asks for it."""

from collections.abc import Callable
from enum import Enum
from typing import Any, get_args

import dagster as dg
from pydantic import Field, create_model

from pipeline_platform.model.pipeline import Pipeline

_PLAIN = (bool, int, float, str)
"""The types that the launchpad knows; a field of another takes any value, and the run refuses what does not fit."""


class RunOrigin(Enum):
    """Where a run takes its messages from: the origins, as the launchpad offers them."""

    source = "source"
    failed = "failed"
    messages = "messages"


class ReceiveConfig(dg.Config):
    """What a run takes on. With an empty config the job says it, or which assets are selected.

    A job names its origin by a tag: Dagster takes no config for backfills of a job that has config of its own.
    """

    origin: RunOrigin | None = Field(
        default=None,
        description="`source` pulls messages, `failed` retries the open failures of the windows, "
        "`messages` replays all messages that the windows received; the new rows replace the old ones. If unset, the "
        "job decides; without a job it is `failed` where only the asset `failed` is selected, else `source`.",
    )
    demand: int | None = Field(
        default=None,
        ge=1,
        description="Most messages to take on; if unset, as many as a run may. A replay takes all in any case.",
    )
    context: dict[str, Any] = Field(default_factory=dict, description="Fields of the pipeline's context to change.")
    ignore_pause: bool = Field(
        default=False, description="Receive messages although the pipeline is paused. If unset, the run ends empty."
    )
    although_paused: bool | None = Field(default=None, description="Deprecated: the former name of `ignore_pause`.")
    producer: str | None = Field(
        default=None,
        description="Name of the producer to pull from, where the pipeline has several. If unset, the run's tag "
        "names it. Backfills and replays are of all producers.",
    )
    failures: dict[str, Any] = Field(
        default_factory=dict,
        description="Which open failures a run on `failed` retries: `state` (`open`, dead ones included; "
        "`waiting`, those not dead; `due`; `dead`), `kind`, `reason` (a part of it), `source`, `message_id`. "
        "Empty for all.",
    )

    def ignores_pause(self, log: Callable[[str], None]) -> bool:
        """Whether the run receives messages although the pipeline is paused; warn of the old option by `log`."""
        if self.although_paused is None:
            return self.ignore_pause
        log("`although_paused` in the run config is deprecated and will be removed. Use `ignore_pause`.")
        return self.ignore_pause or self.although_paused

    def overrides(self) -> dict[str, Any]:
        """The fields of the context that are given."""
        context: Any = self.context
        return context.model_dump(exclude_unset=True) if isinstance(context, dg.Config) else context


def receive_config_of(pipeline: type[Pipeline]) -> type[ReceiveConfig]:
    """`ReceiveConfig`, whose `context` has the fields of the pipeline's own, and no others.

    The fields have no defaults here: a run changes those that are given, and takes the others from the class. Dagster
    drops null where a field is declared, so a field that null would change stays undeclared. Only a context with such a
    field takes names that it does not declare; the run refuses those that are misspelt.
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
