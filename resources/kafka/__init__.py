"""Kafka as a source."""

from resources.kafka.source import KafkaSource

__all__ = ["KafkaSource"]
