"""Pipelines that do what a payload says, and a queue of moods: whole runs in Dagster are tested with these.

No Dagster here, which each of Spark's Python workers would import for them.
"""

import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from pipeline_platform.model.message import BatchInfo, Message
from pipeline_platform.model.options import Batcher, Processors, Producer, TableBatcher
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.source.contract import Refused, SourceError
from resources.table_queue import TableQueue

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SINCE = datetime(2025, 1, 1, tzinfo=UTC)


class Line(BaseModel):
    """What most messages become."""

    text: str


class Rules(BaseModel):
    """What a run may change."""

    forgiving: bool = False


class Told(Pipeline):
    """Lines of text, which may ask to fail, to take long, to leave a trace, or to go by letter."""

    name = "told"
    producer = Producer(source="queue", max_runs=2, oldest_allowed=timedelta(minutes=5))
    processors = Processors(concurrency=2, max_demand=50)
    batchers = {"lines": TableBatcher(schema=Line), "letters": Batcher(batch_size=3)}
    context = Rules()
    first_window = SINCE
    owners = ("team:tests",)

    def handle_message(self, message: Message, context: Rules) -> Message:
        """Obey."""
        text = message.data.decode()
        if text.startswith("fail") and not context.forgiving:
            return message.failed("told to fail")
        if text.startswith("sleep "):
            time.sleep(float(text.split()[1]))
        if text.startswith("touch "):
            Path(text.removeprefix("touch ")).touch()
        if text.startswith("wait for "):
            while not Path(text.removeprefix("wait for ")).exists():
                time.sleep(0.1)
        if text.startswith("letter "):
            return message.put_data({"text": text}).put_batcher("letters").put_batch_key(text[-1])
        return message.put_data(Line(text=text)).put_batch_key(text[:1]).put_batcher("lines")

    def handle_batch(
        self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Rules
    ) -> list[Message]:
        """Fail the batches of the letter x."""
        if batch_info.batch_key == "x":
            raise ValueError("not this letter")
        return messages


class Beside(Told):
    """Another pipeline with the same partitions, over a queue of its own."""

    name = "beside"
    producer = Producer(source="beside_queue")


class Strict(Told):
    """A single failure turns its runs red."""

    name = "strict"
    fail_run_on = "any"


class Judged(Strict):
    """The same, and nothing pulls by itself."""

    name = "judged"
    producer = Producer(source="queue", schedule="0 0 1 1 *")


class Lenient(Told):
    """Half may fail."""

    name = "lenient"
    fail_run_on = 0.5


class Bare(Pipeline):
    """No batchers: what is handled leaves its outcome behind and nothing else."""

    name = "bare"
    producer = Producer(source="queue")
    first_window = SINCE

    def handle_message(self, message: Message, context: Any) -> Message:
        """Nothing to do."""
        return message


class Fast(Pipeline):
    """The fast lane."""

    name = "fast"
    producer = Producer(source="queue")
    batchers = {"lines": TableBatcher(schema=Line)}
    first_window = SINCE

    def handle_messages(self, messages: "DataFrame", context: Any) -> "DataFrame":
        """Every line to the table, by column expressions."""
        from pyspark.sql import functions as f

        return messages.withColumns({"text": f.col("data").cast("string"), "batcher": f.lit("lines")})


PIPELINES: dict[str, type[Pipeline]] = {pipeline.name: pipeline for pipeline in (Told, Strict, Lenient, Bare, Fast)}


class MoodyQueue(TableQueue):
    """A table queue that refuses to be told, or to be looked at, while a file lies beside it."""

    def _sulks(self, mood: str) -> bool:
        return Path(self.url.removeprefix("sqlite:///")).with_name(mood).exists()

    def ack(self, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Refuse in the mood `no ack`."""
        if self._sulks("no ack"):
            raise SourceError("queue: told to refuse")
        return super().ack(ack_ref, ack_ids)


class Widened(BaseModel):
    """A line that has gained a field."""

    text: str
    words: int | None = None


class Changed(BaseModel):
    """A line whose text has become a number."""

    text: int


def told_with(model: type[BaseModel]) -> type[Pipeline]:
    """The same pipeline after an edit: its table has another model."""

    class Edited(Told):
        """Edited."""

        name = "told"
        batchers = {"lines": TableBatcher(schema=model), "letters": Batcher(batch_size=3)}

        def handle_message(self, message: Message, context: Rules) -> Message:
            """Count words."""
            text = message.data.decode()
            return message.put_data({"text": text, "words": len(text.split())}).put_batcher("lines")

    return Edited
