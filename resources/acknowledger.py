"""Acknowledges published messages in groups, with up to three attempts for messages that a source refuses."""

from pipeline_platform.orchestration import AcknowledgerResource

acknowledger = AcknowledgerResource(attempts=3, wait_s=1.0)
