"""Kinesis Data Streams as a source."""

from pipeline_platform.connectors.kinesis.kinesis_source import KinesisSource

__all__ = ["KinesisSource"]
