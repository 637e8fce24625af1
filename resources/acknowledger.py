"""Acknowledges what is decided and published, in groups: what a source refuses is asked for three times in all."""

from pipeline_platform.orchestration import AcknowledgerResource

acknowledger = AcknowledgerResource(attempts=3, wait_s=1.0)
