"""How messages are acknowledged: the words that a source takes, and which of them end a message."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Word(NamedTuple):
    """The effect of one word at its source.

    Attributes:
        ends: Whether the message is done with at the source. If not, it comes back.
        longest_s: Seconds that may follow the word after a colon; None where none may.
        again: The word that takes its place for a message that was delivered before; None for the same.
        gives_back: Whether the message is delivered again at once, as one is that nobody began to handle.
    """

    ends: bool
    longest_s: int | None = None
    again: str | None = None
    gives_back: bool = False


Words = Mapping[str, Word]

EARLY = "told early"
"""The action of a message that `ack_immediately` acknowledged: there is nothing left to do."""

LEASED: Words = {
    "ack": Word(ends=True),
    "noop": Word(ends=False),
    "nack": Word(ends=False, longest_s=999_999, gives_back=True),
}
"""`ack` is done with, `noop` left alone until its lease runs out, `nack` given back now, `nack:<s>` after a delay."""


class AckPolicy(NamedTuple):
    """What the tasks that handle messages know of a source: no address, no credentials.

    Attributes:
        source: Its name.
        on_success: The action for a message that is handled, unless the message says otherwise.
        on_failure: The action for a message that failed, unless the message says otherwise.
        words: What an action may be; none where nobody is told, and every action ends a message.
        closes_failures: Whether its messages are open failures, which end where one is handled.
        at_once: Acknowledges messages now, for `ack_immediately`; None where the pipeline does not.
    """

    source: str
    on_success: str = "ack"
    on_failure: str = "ack"
    words: Words = LEASED
    closes_failures: bool = False
    at_once: Callable[[Sequence[Any]], None] | None = None

    def checked(self, action: object) -> str:
        """Return an action as plain text.

        Raises:
            ValueError: The source lacks the word, or does not wait so long.
        """
        # A subclass of str could override comparison; isinstance would believe what the value says of its own class.
        text = str.__str__(action) if issubclass(type(action), str) else repr(action)
        if not self.words:  # nothing is acknowledged
            return text
        word, colon, seconds = text.partition(":")
        known = self.words.get(word)
        delayed = known is not None and known.longest_s is not None and seconds.isdecimal()
        if known is None or (colon and not (delayed and int(seconds) <= (known.longest_s or 0))):
            near = [] if known else difflib.get_close_matches(word, self.words, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{self.source} acknowledges a message by {self._choices}, not {action!r}{hint}")
        return text

    def ends(self, action: str) -> bool:
        """Whether the source is done with a message that is acknowledged so."""
        word = self.words.get(action.partition(":")[0])
        return not self.words or (word is not None and word.ends)

    def of_delivery(self, action: str, *, redelivered: bool) -> str:
        """The action for one delivery, where a word means another thing the second time."""
        word = self.words.get(action.partition(":")[0])
        return (word.again if redelivered and word is not None else None) or action

    @property
    def giving_back(self) -> str | None:
        """The action for a message that nobody began to handle; None where the source takes none back."""
        return next((word for word, one in self.words.items() if one.gives_back), None)

    @property
    def _choices(self) -> str:
        choices = [repr(word) for word in self.words]
        choices += [
            f"'{word}:<seconds>' (up to {one.longest_s:,})" for word, one in self.words.items() if one.longest_s
        ]
        return " or ".join(filter(None, [", ".join(choices[:-1]), choices[-1]]))
