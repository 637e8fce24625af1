"""Testing kit for pipelines and connectors, without Spark, Dagster and pytest.

`test_message` and `test_batch` call the callbacks of a pipeline, `check_source` checks the promises of a connector, and
a `DummySource` replaces a source in definitions.
"""

from pipeline_platform.testing.callbacks import Acknowledged, test_batch, test_message
from pipeline_platform.testing.dummy import DummySource
from pipeline_platform.testing.server_under_test import PAGES, PAYLOADS, TEXTS, Server
from pipeline_platform.testing.source_check import Report, check_source, promises_of
from pipeline_platform.testing.trial import BrokenPromiseError

__all__ = [
    "PAGES",
    "PAYLOADS",
    "TEXTS",
    "Acknowledged",
    "BrokenPromiseError",
    "DummySource",
    "Report",
    "Server",
    "check_source",
    "promises_of",
    "test_batch",
    "test_message",
]
