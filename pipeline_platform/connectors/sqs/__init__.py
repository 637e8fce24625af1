"""SQS as a source, and payloads in S3."""

from pipeline_platform.connectors.sqs.s3_payloads import S3Payloads
from pipeline_platform.connectors.sqs.sqs_source import SqsSource

__all__ = ["S3Payloads", "SqsSource"]
