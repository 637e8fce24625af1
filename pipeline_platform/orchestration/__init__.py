"""Dagster definitions of pipelines: assets, sensors, jobs, checks and resources."""

from pipeline_platform.orchestration.asset_windows import WHEN_NEW
from pipeline_platform.orchestration.component import PipelineComponent
from pipeline_platform.orchestration.deployment import platform_definitions
from pipeline_platform.orchestration.graph import pipeline_assets
from pipeline_platform.orchestration.latest import latest_of
from pipeline_platform.orchestration.resources.default_resources import default_resources
from pipeline_platform.orchestration.resources.lake_resources import IO_MANAGER, ControlResource, LakeResource
from pipeline_platform.orchestration.resources.sink_resources import sink_resource
from pipeline_platform.orchestration.resources.source_resources import AcknowledgerResource, source_resource
from pipeline_platform.orchestration.resources.spark_resource import SparkResource
from pipeline_platform.orchestration.sensors.alerts import Alert, Alerts
from pipeline_platform.orchestration.sensors.producers import producer_sensor

__all__ = [
    "IO_MANAGER",
    "WHEN_NEW",
    "AcknowledgerResource",
    "Alert",
    "Alerts",
    "ControlResource",
    "LakeResource",
    "PipelineComponent",
    "SparkResource",
    "default_resources",
    "latest_of",
    "pipeline_assets",
    "platform_definitions",
    "producer_sensor",
    "sink_resource",
    "source_resource",
]
