"""SQS as a source."""

from pipeline_platform.connectors.sqs.sqs_source import SqsSource

__all__ = ["SqsSource"]
