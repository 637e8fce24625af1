"""Ack actions: the actions that a source accepts for a message, and their effects."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class AckAction(NamedTuple):
    """The effect of an ack action at its source.

    Attributes:
        ends: Whether the source removes the message. If not, the message is redelivered.
        longest_s: Most seconds of delay, written after a colon (`nack:30`); None if the action takes no delay.
        again: The action used instead for a message that was delivered before; None for the same action.
        gives_back: Whether the message is released and redelivered at once. Used for messages that were not started.
    """

    ends: bool
    longest_s: int | None = None
    again: str | None = None
    gives_back: bool = False


AckActions = Mapping[str, AckAction]

EARLY = "acknowledged early"
"""Action of a message that `ack_immediately` acknowledged: nothing is left to do."""

LEASED: AckActions = {
    "ack": AckAction(ends=True),
    "noop": AckAction(ends=False),
    "nack": AckAction(ends=False, longest_s=999_999, gives_back=True),
}
"""`ack` removes the message, `noop` lets its lease expire, `nack` releases it now, `nack:<s>` after a delay."""


class AckPolicy(NamedTuple):
    """The ack actions of a source, for tasks that handle messages. It contains no address and no credentials.

    Attributes:
        source: Name of the source.
        on_success: Default action for a handled message.
        on_failure: Default action for a failed message.
        actions: Valid actions. Empty if nothing is acknowledged: then every action is valid and ends a message.
        closes_failures: Whether its messages are open failures, which are closed when they are handled.
        at_once: Function that acknowledges messages now, for `ack_immediately`; None if the pipeline does not use it.
    """

    source: str
    on_success: str = "ack"
    on_failure: str = "ack"
    actions: AckActions = LEASED
    closes_failures: bool = False
    at_once: Callable[[Sequence[Any]], None] | None = None

    def checked(self, action: object) -> str:
        """Return an action as plain text.

        Raises:
            ValueError: The action is not valid for the source, or its delay is too long.
        """
        # A subclass of str could override comparison, and a value could lie to isinstance about its class.
        text = str.__str__(action) if issubclass(type(action), str) else repr(action)
        if not self.actions:  # nothing is acknowledged
            return text
        verb, colon, seconds = text.partition(":")
        known = self.actions.get(verb)
        delayed = known is not None and known.longest_s is not None and seconds.isdecimal()
        if known is None or (colon and not (delayed and int(seconds) <= (known.longest_s or 0))):
            near = [] if known else difflib.get_close_matches(verb, self.actions, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"{action!r} is not a valid ack action of {self.source}. Valid actions: {self._choices}.{hint}"
            )
        return text

    def ends(self, action: str) -> bool:
        """Whether this action removes the message from the source."""
        verb = self.actions.get(action.partition(":")[0])
        return not self.actions or (verb is not None and verb.ends)

    def of_delivery(self, action: str, *, redelivered: bool) -> str:
        """Return the action for a delivery; some actions are replaced for redeliveries."""
        verb = self.actions.get(action.partition(":")[0])
        return (verb.again if redelivered and verb is not None else None) or action

    @property
    def giving_back(self) -> str | None:
        """Action for messages that were not started; None if the source cannot release messages."""
        return next((verb for verb, effect in self.actions.items() if effect.gives_back), None)

    @property
    def _choices(self) -> str:
        choices = [repr(verb) for verb in self.actions]
        choices += [
            f"'{verb}:<seconds>' (up to {effect.longest_s:,})"
            for verb, effect in self.actions.items()
            if effect.longest_s
        ]
        return " or ".join(filter(None, [", ".join(choices[:-1]), choices[-1]]))
