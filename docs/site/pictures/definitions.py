"""A deployment for pictures: three pipelines with table queues."""

import os
import random
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg
from pydantic import BaseModel

from pipeline_platform import Batcher, BatchInfo, Message, Pipeline, Processors, Producer, Retry, TableBatcher
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.orchestration import (
    ControlResource,
    LakeResource,
    SparkResource,
    platform_definitions,
    source_resource,
)

HOME = os.environ.get("PICTURES_HOME", "")  # workers import this file without it


class Order(BaseModel):
    """An order."""

    number: int
    total: float


class Rules(BaseModel):
    """Settings of the callbacks."""

    negative_is_valid: bool = False
    review_above: float = 900


class Orders(Pipeline):
    """Orders; large orders are reviewed in batches."""

    name = "orders"
    producer = Producer(source="orders_queue", oldest_allowed=timedelta(minutes=1))
    processors = Processors(max_demand=1_000)
    batchers = {"orders": TableBatcher(schema=Order), "reviews": Batcher(schema=Order, batch_size=20)}
    retry = Retry(max_attempts=3)
    context = Rules()
    first_window = datetime(2026, 11, 1, tzinfo=UTC)

    def handle_message(self, message: Message, context: Any) -> Message:
        """Route an order by its total."""
        order = message.json(Order)
        if order.total < 0 and not context.negative_is_valid:
            return message.failed(f"order {order.number} has a negative total: {order.total}")
        return message.put(order, batcher="reviews" if order.total > context.review_above else "orders")

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Any) -> list[Message]:
        """Review orders."""
        time.sleep(0.1)
        return messages


class Payments(Orders):
    """Payments, some of which a service refuses."""

    name = "payments"
    producer = Producer(source="payments_queue")
    batchers = {"payments": TableBatcher(schema=Order)}
    retry = None

    def handle_message(self, message: Message, context: Any) -> Message:
        """Fail a tenth of the payments."""
        order = message.json(Order)
        if random.random() < 0.1:
            raise ConnectionError(f"payment {order.number}: the bank does not answer")
        return message.put(order, batcher="payments")


class Shipments(Orders):
    """Shipments, which are paused."""

    name = "shipments"
    producer = Producer(source="shipments_queue", oldest_allowed=timedelta(minutes=1))
    batchers = {"shipments": TableBatcher(schema=Order)}


PIPELINES = [Orders, Payments, Shipments]
URLS = {each.name: f"sqlite:///{HOME}/{each.name}.sqlite" for each in PIPELINES}
URLS["payments"] = os.environ.get("PAYMENTS_URL", URLS["payments"])
QUEUES = {
    f"{name}_queue": source_resource(TableQueue)(name=f"{name}_queue", url=url, created_column="created_at")
    for name, url in URLS.items()
}
RESOURCES = {
    "lake": LakeResource(root=f"{HOME}/lake"),
    "control": ControlResource(url=f"sqlite:///{HOME}/control.sqlite"),
    "spark": SparkResource(state_folder=f"{HOME}/spark"),
    **QUEUES,
}
defs = dg.Definitions.merge(platform_definitions(PIPELINES, RESOURCES), dg.Definitions(executor=dg.in_process_executor))
