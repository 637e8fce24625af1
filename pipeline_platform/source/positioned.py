"""Sources that only store messages: the control store contains their leases and positions."""

from collections.abc import Sequence
from typing import ClassVar

from pipeline_platform.model.actions import AckAction, AckActions
from pipeline_platform.source.contract import LeasedIds, Refused, Source
from pipeline_platform.source.offsets import Positions


class WholeReceiveSource(Source):
    """A source that acknowledges a whole receive, in `finish`.

    Failed messages are acknowledged, too: the failed-message table contains them.
    """

    acknowledges_by_id: ClassVar[bool] = False
    gives_back_offsets: ClassVar[bool] = True

    @property
    def ack_actions(self) -> AckActions:
        """`ack` only: a receive is acknowledged or not."""
        return {"ack": AckAction(ends=True)}

    def acknowledge(self, action: str, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Do nothing: `finish` acknowledges."""
        return []


class PositionedSource(WholeReceiveSource):
    """A source whose positions and leases are in the control store. `ack_ref` is the name of a message's partition."""

    @property
    def positions(self) -> Positions:
        """Positions of the source; raises `SourceError` if `open` was not called."""
        if self._positions is None:
            raise self.error("the source is not open. Call open() with a control store first.")
        return self._positions

    def holders(self) -> set[str]:
        """Return the receives that have leased spans."""
        places = self.positions.places(self.name).values()
        return {span.holder for place in places for span in place.spans if span.holder}

    def abandon(self, receive_id: str, held: LeasedIds) -> None:
        """Release the spans of a crashed receive."""
        self.positions.give_back(self.name, receive_id)
