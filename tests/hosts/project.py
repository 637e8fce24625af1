"""Deployment for the hosts, with one pipeline."""

WORKSPACE = """
load_from:
  - python_module: { module_name: definitions, working_directory: ., location_name: hosts }
"""

PIPELINES = '''
import time
from datetime import timedelta

from pydantic import BaseModel

from pipeline_platform import Pipeline, Processors, Producer, TableBatcher


class Number(BaseModel):
    """Payload of a message."""

    n: int


class Counted(Pipeline):
    """Writes each number to a table."""

    name = "counted"
    producer = Producer(source="queue", max_runs=2, interval=timedelta(seconds=5))
    processors = Processors(concurrency=2, max_demand=1_000)
    batchers = {"numbers": TableBatcher(schema=Number)}

    def handle_message(self, message, context):
        time.sleep(0.005)  # a fault meets runs in the middle
        return message.put(message.json(Number), batcher="numbers")
'''

DEFINITIONS = """
import os

from counted import Counted
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.orchestration import ControlResource, LakeResource, SparkResource, platform_definitions
from pipeline_platform.orchestration import source_resource

QUEUE = TableQueue(name="queue", url=os.environ["QUEUE_URL"])
RESOURCES = {
    "lake": LakeResource(root=os.environ["PIPELINE_PLATFORM_LAKE"]),
    "control": ControlResource(url=os.environ["PIPELINE_PLATFORM_CONTROL"]),
    "spark": SparkResource(
        remote=os.environ["PIPELINE_PLATFORM_SPARK"], ui=os.environ["PIPELINE_PLATFORM_SPARK_UI"]
    ),
    "queue": source_resource(TableQueue)(name="queue", url=os.environ["QUEUE_URL"]),
}
defs = platform_definitions([Counted], RESOURCES)
"""
