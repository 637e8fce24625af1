"""Testing kit for pipelines and connectors, without Spark, Dagster and pytest.

`test_message` and `test_batch` call the callbacks of a pipeline, `check_source` and `check_sink` check the promises of
a connector and a sink, and a `DummySource` replaces a source in definitions.
"""

from pipeline_platform.testing.callbacks import Acknowledged, test_batch, test_message
from pipeline_platform.testing.dummy import DummySource
from pipeline_platform.testing.promises import BrokenPromiseError, Report
from pipeline_platform.testing.server_under_test import PAGES, PAYLOADS, TEXTS, Server
from pipeline_platform.testing.sinks.sink_check import check_sink, sink_promises
from pipeline_platform.testing.sinks.sink_trial import Store
from pipeline_platform.testing.source_check import check_source, promises_of

__all__ = [
    "PAGES",
    "PAYLOADS",
    "TEXTS",
    "Acknowledged",
    "BrokenPromiseError",
    "DummySource",
    "Report",
    "Server",
    "Store",
    "check_sink",
    "check_source",
    "promises_of",
    "sink_promises",
    "test_batch",
    "test_message",
]
