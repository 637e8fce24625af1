"""RabbitMQ as a source."""

from resources.rabbitmq.source import RabbitmqSource

__all__ = ["RabbitmqSource"]
