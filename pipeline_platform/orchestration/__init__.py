"""A pipeline as Dagster sees it: assets, sensors, jobs, checks and resources, to put a deployment together from."""

from pipeline_platform.orchestration.alerts import Alert, Alerts
from pipeline_platform.orchestration.asset_windows import WHEN_NEW
from pipeline_platform.orchestration.component import PipelineComponent
from pipeline_platform.orchestration.deployment import platform_definitions
from pipeline_platform.orchestration.graph import pipeline_assets
from pipeline_platform.orchestration.lake_resources import IO_MANAGER, ControlResource, LakeResource
from pipeline_platform.orchestration.producers import producer_sensor
from pipeline_platform.orchestration.source_resources import AcknowledgerResource, source_resource
from pipeline_platform.orchestration.spark_resource import SparkResource

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
    "pipeline_assets",
    "platform_definitions",
    "producer_sensor",
    "source_resource",
]
