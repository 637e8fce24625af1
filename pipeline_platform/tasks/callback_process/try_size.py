"""Number of rows of the next try of a callback process."""

QUICK_S = 0.5
"""A faster try doubles the rows of the next one: sending results costs a millisecond or more per try."""


class TrySize:
    """Number of rows of the next try of a callback process that sends its results to the task after each try.

    Args:
        first: Number of rows of the first try; None if tries have no limit, because results are not sent.

    Attributes:
        rows: Maximum number of rows of the next try; None for no limit.
    """

    def __init__(self, first: int | None = None) -> None:
        self._first = self.rows = first

    def after(self, rows: int, left: int, seconds: float) -> None:
        """Adapt to a try of some rows, of which some are left."""
        if self.rows is None or self._first is None:
            return
        if left:  # many children filled the memory limit: permits for further rows would be lost
            self.rows = max(1, rows - left)
        elif seconds > QUICK_S:
            self.rows = min(self.rows, self._first)
        elif rows == self.rows:
            self.rows *= 2
