"""Plot of a run's rounds, as text that Dagster's pages show."""

import time
from collections import deque
from dataclasses import dataclass, field

import psutil

_BARS = "▁▂▃▄▅▆▇█"
_MINUTES = 60


@dataclass
class _Minute:
    number: int
    rounds: int = 0
    messages: int = 0
    slowest_s: float = 0.0
    memory_mb: float = 0.0


@dataclass
class RoundsPlot:
    """Rounds of the last hour, by minute."""

    _minutes: deque[_Minute] = field(default_factory=lambda: deque(maxlen=_MINUTES))

    def add(self, messages: int, seconds: float, now: float | None = None) -> None:
        """Add a round that took some seconds."""
        number = int((time.time() if now is None else now) // 60)
        while not self._minutes or self._minutes[-1].number < number:
            last = self._minutes[-1].number if self._minutes else number - 1
            self._minutes.append(_Minute(max(last + 1, number - _MINUTES)))
        minute = self._minutes[-1]
        minute.rounds += 1
        minute.messages += messages
        minute.slowest_s = max(minute.slowest_s, seconds)
        minute.memory_mb = psutil.Process().memory_info().rss / 1e6

    def markdown(self) -> str:
        """Return a line of bars for each figure, with a bar for each minute."""
        figures = {
            "rounds per minute": [float(minute.rounds) for minute in self._minutes],
            "messages per minute": [float(minute.messages) for minute in self._minutes],
            "slowest round, s": [minute.slowest_s for minute in self._minutes],
            "memory of the run, MB": [minute.memory_mb for minute in self._minutes],
        }
        return "\n".join(["```", *(_line(name, values) for name, values in figures.items()), "```"])


def _line(name: str, values: list[float]) -> str:
    most = max(values, default=0.0)
    bars = "".join(_BARS[round(value / most * (len(_BARS) - 1))] if most else _BARS[0] for value in values)
    return f"{name:<21} {bars} up to {most:,.4g}"
