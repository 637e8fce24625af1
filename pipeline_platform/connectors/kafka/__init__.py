"""Kafka as a source."""

from pipeline_platform.connectors.kafka.kafka_source import KafkaSource

__all__ = ["KafkaSource"]
