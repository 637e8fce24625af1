"""Pipelines for tests of whole flows on Spark: each message says what is to happen to it."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from pipeline_platform.model.message import BatchInfo, Message
from pipeline_platform.model.options import Batcher, Processors, Producer, RateLimiting, TableBatcher
from pipeline_platform.model.pipeline import Pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Word(BaseModel):
    """One word."""

    word: str


class Obedient(Pipeline):
    """Does what a payload says; all else is a word for the table."""

    name = "obedient"
    producer = Producer(source="queue", max_runs=2)
    processors = Processors(concurrency=2, max_demand=1_000)
    batchers = {"words": TableBatcher(schema=Word), "batches": Batcher(batch_size=3, concurrency=2)}

    def handle_message(self, message: Message, context: Any) -> Message:
        """Obey."""
        text = message.data.decode()
        if text == "raise":
            raise ValueError("told to")
        if text == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "leave":
            os._exit(3)
        if text == "exit":
            sys.exit(4)
        if text == "none":
            return None  # type: ignore[return-value]
        if text.startswith("batch "):
            return message.put_data({"word": text}).put_batcher("batches").put_batch_key(text.removeprefix("batch "))
        return message.put_data(Word(word=text)).put_batcher("words")

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Any) -> list[Message]:
        """Obey by key."""
        if batch_info.batch_key == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if batch_info.batch_key == "raise":
            raise ValueError("told to")
        if batch_info.batch_key == "few":
            return messages[1:]
        return messages


class Paced(Pipeline):
    """Ten a second; each says when it was handled."""

    name = "paced"
    producer = Producer(source="queue", rate_limiting=RateLimiting(allowed_messages=10, interval=timedelta(seconds=1)))
    batchers = {"words": TableBatcher(schema=Word)}

    def handle_message(self, message: Message, context: Any) -> Message:
        """To the table."""
        return message.put_data(Word(word=str(time.time()))).put_batcher("words")


class Twisted(Pipeline):
    """The fast lane gone wrong, as the first message says."""

    name = "twisted"
    producer = Producer(source="queue")
    batchers = {"words": TableBatcher(schema=Word)}

    def handle_messages(self, messages: DataFrame, context: Any) -> DataFrame:
        """Obey."""
        from pyspark.sql import functions as f

        text = f.col("data").cast("string")
        rows = messages.withColumns({"word": text, "batcher": f.lit("words")})
        fault = rows.where("position = 0").select(text.alias("fault")).first()["fault"]
        if fault == "one for another":
            return rows.where("position = 0").union(rows.where("position = 0")).union(rows.where("position > 1"))
        if fault == "one too many and two lost":
            return rows.where("position = 0").union(rows.where("position = 0"))
        if fault == "one too many":
            return rows.union(rows.where("position = 0"))
        return rows.withColumn(fault, f.lit("7").cast(messages.schema[fault].dataType))


class Columns(Pipeline):
    """The fast lane: by column expressions; `drop` is dropped, `fail` fails, `lost` has no batcher."""

    name = "columns"
    producer = Producer(source="queue")
    batchers = {"words": TableBatcher(schema=Word), "batches": Batcher(schema=Word, batch_size=2)}

    def handle_messages(self, messages: DataFrame, context: Any) -> DataFrame:
        """Route words."""
        from pyspark.sql import functions as f

        text = f.col("data").cast("string")
        return (
            messages.withColumn("word", text)
            .where(text != "drop")
            .withColumns(
                {
                    "status": f.when(text == "fail", "failed").otherwise("ok"),
                    "reason": f.when(text == "fail", "told to"),
                    "batcher": f.when(text == "lost", "nowhere")
                    .when(text.like("batch%"), "batches")
                    .otherwise("words"),
                    "batch_key": f.substring(text, 1, 1),
                }
            )
        )

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Any) -> list[Message]:
        """Nothing outside."""
        return messages
