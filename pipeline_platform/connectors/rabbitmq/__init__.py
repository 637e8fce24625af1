"""RabbitMQ as a source."""

from pipeline_platform.connectors.rabbitmq.rabbitmq_source import RabbitmqSource

__all__ = ["RabbitmqSource"]
