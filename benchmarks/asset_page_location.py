"""Code location of `benchmarks.asset_page`: a pipeline with failures, whose first window and folder are variables."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipeline_platform import Message, Pipeline, Producer, Retry, TableBatcher
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.orchestration.deployment import platform_definitions
from pipeline_platform.orchestration.resources.lake_resources import ControlResource, LakeResource
from pipeline_platform.orchestration.resources.source_resources import source_resource
from pipeline_platform.orchestration.resources.spark_resource import SparkResource

FOLDER = "ASSET_PAGE_FOLDER"
FIRST_WINDOW = "ASSET_PAGE_FIRST_WINDOW"
_FOLDER = Path(os.environ.get(FOLDER, "."))
QUEUE = {"name": "orders_queue", "url": f"sqlite:///{_FOLDER}/queue.sqlite"}


class Order(BaseModel):
    """An order."""

    number: int
    total: float


class Orders(Pipeline):
    """Orders, some of which fail."""

    name = "orders"
    producer = Producer(source="orders_queue")
    batchers = {"orders": TableBatcher(schema=Order), "refunds": TableBatcher(schema=Order)}
    retry = Retry(max_attempts=3)
    first_window = datetime.fromisoformat(os.environ.get(FIRST_WINDOW, "2026-01-01")).astimezone(UTC)

    def handle_message(self, message: Message, context: Any) -> Message:
        """Store an order."""
        order = message.json(Order)
        if order.total < 0:
            raise ValueError(f"order {order.number} has a negative total: {order.total}")
        return message.put(order, batcher="orders")


defs = platform_definitions(
    [Orders],
    {
        "lake": LakeResource(root=f"{_FOLDER}/lake"),
        "control": ControlResource(url=f"sqlite:///{_FOLDER}/control.sqlite"),
        "spark": SparkResource(packages=["benchmarks"]),
        "orders_queue": source_resource(TableQueue)(**QUEUE),
    },
)
