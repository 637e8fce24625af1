"""The pipeline whose runs are killed and stalled; no Dagster, which each of Spark's workers would import for it."""

import json
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipeline_platform.model.message import BatchInfo, Message
from pipeline_platform.model.options import Batcher, Processors, Producer, TableBatcher
from pipeline_platform.model.pipeline import Pipeline


class Number(BaseModel):
    """What the messages hold."""

    n: int


class Rules(BaseModel):
    """What a backfill changes."""

    tenths_fail: bool = True


class Numbers(Pipeline):
    """Every third to `thirds` in batches, every tenth fails at first, all others to `numbers`."""

    name = "numbers"
    producer = Producer(source="queue", max_runs=4)
    processors = Processors(concurrency=2, max_demand=100)
    batchers = {"numbers": TableBatcher(schema=Number), "thirds": Batcher(schema=Number, batch_size=7)}
    context = Rules()

    def handle_message(self, message: Message, context: Rules) -> Message:
        """Route a number."""
        number = Number.model_validate_json(message.data)
        if number.n % 10 == 0 and context.tenths_fail:
            return message.failed("a tenth")
        return message.put_data(number).put_batcher("thirds" if number.n % 3 == 0 else "numbers")

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Any) -> list[Message]:
        """Nothing outside: the table is the result."""
        return messages


class Thousands(Numbers):
    """As many as a cluster is worth, at a pace at which one can be hit in the middle; a message may leave a trace."""

    name = "thousands"
    processors = Processors(concurrency=4, max_demand=10_000)
    batchers = {"numbers": TableBatcher(schema=Number), "thirds": Batcher(schema=Number, batch_size=100)}

    def handle_message(self, message: Message, context: Rules) -> Message:
        """Route a number, every hundredth slowly."""
        asked = json.loads(message.data)
        if "touch" in asked:
            Path(asked["touch"]).touch()
        if asked["n"] % 100 == 0:
            time.sleep(0.02)
        return super().handle_message(message, context)


def expected(numbers: range, *, tenths_fail: bool = True) -> dict[str, set[int]]:
    """What each table must hold in the end, by number."""
    failed = {n for n in numbers if n % 10 == 0 and tenths_fail}
    thirds = {n for n in numbers if n % 3 == 0} - failed
    return {"failed": failed, "thirds": thirds, "numbers": set(numbers) - failed - thirds}
