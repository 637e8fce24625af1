"""Google Pub/Sub as a source."""

from pipeline_platform.connectors.pubsub.pubsub_source import PubsubSource

__all__ = ["PubsubSource"]
