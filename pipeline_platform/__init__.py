"""Public API for authors of pipelines and connectors. Importing it loads neither Spark nor Dagster."""

from pipeline_platform import telemetry
from pipeline_platform.model.blocks import ack_immediately, columns
from pipeline_platform.model.failure import Failure, PayloadError
from pipeline_platform.model.formats.block_formats import avro_columns, json_schema_columns, protobuf_columns
from pipeline_platform.model.formats.compression import decompressed
from pipeline_platform.model.message import Message
from pipeline_platform.model.options import (
    Batcher,
    Breaker,
    Processors,
    Producer,
    RateLimiting,
    Retention,
    Splitter,
    TableBatcher,
)
from pipeline_platform.model.pipeline import BatchInfo, Pipeline
from pipeline_platform.model.retry import Backoff, Retry
from pipeline_platform.model.strict_options import PipelineError
from pipeline_platform.source import calls
from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.clients import AsyncClient, per_process
from pipeline_platform.source.connection import ConnectedSource
from pipeline_platform.source.contract import LeasedIds, Refused, Share, Source, SourceAwayError, SourceError
from pipeline_platform.source.leased import LeasedSource
from pipeline_platform.source.log import Extent, LogSource
from pipeline_platform.source.metadata import with_metadata

__all__ = [
    "AsyncClient",
    "Backlog",
    "Backoff",
    "BatchInfo",
    "Batcher",
    "Breaker",
    "ConnectedSource",
    "Extent",
    "Failure",
    "LeasedIds",
    "LeasedSource",
    "LogSource",
    "Message",
    "PayloadError",
    "Pipeline",
    "PipelineError",
    "Processors",
    "Producer",
    "RateLimiting",
    "Refused",
    "Retention",
    "Retry",
    "Share",
    "Source",
    "SourceAwayError",
    "SourceError",
    "Splitter",
    "TableBatcher",
    "ack_immediately",
    "avro_columns",
    "calls",
    "columns",
    "decompressed",
    "json_schema_columns",
    "per_process",
    "protobuf_columns",
    "telemetry",
    "with_metadata",
]
