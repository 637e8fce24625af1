"""Which failures: a choice by criteria, small enough for a run's configuration however many messages it is about."""

from datetime import datetime
from typing import Literal, Self

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, Field

State = Literal["open", "waiting", "due", "dead"]
"""Of failures that are not closed: `open` are all, `waiting` those not dead, `due` those whose time has come."""


class Selection(BaseModel, frozen=True, extra="forbid"):
    """Failures by the latest event of each; all criteria together. By default all that are open, dead ones included."""

    state: State = Field("open", description="`open`, dead ones included; `waiting`, those not dead; `due`; or `dead`.")
    message_id: str | None = Field(None, description="Of this message alone.")
    source: str | None = Field(None, description="Of this source alone, by its name: ids are unique per source.")
    kind: str | None = Field(None, description="Of this kind, exactly.")
    reason: str | None = Field(None, description="Whose reason contains this text.")
    due_by: datetime | None = Field(None, description="What `due` goes by; the time that the run begins if unset.")

    def at(self, now: datetime) -> Self:
        """The same at a fixed time: each look of a run finds the same failures due."""
        return self.model_copy(update={"due_by": self.due_by or now}) if self.state == "due" else self

    @property
    def by_words(self) -> bool:
        """Whether it goes by what a failure says."""
        return self.kind is not None or self.reason is not None

    def matches(self, rows: pa.Table) -> pa.Array:
        """Which rows, with the columns `kind` and `reason`, it is about."""
        chosen = pa.chunked_array([pa.repeat(True, rows.num_rows)])
        if self.kind is not None:
            chosen = pc.and_(chosen, pc.fill_null(pc.equal(rows["kind"], self.kind), False))
        if self.reason is not None:
            chosen = pc.and_(chosen, pc.fill_null(pc.match_substring(rows["reason"], self.reason), False))
        return chosen


ALL = Selection()
