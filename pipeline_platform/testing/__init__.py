"""Try what you wrote without Spark, Dagster or pytest: `check_source` asks a connector for all that it promises."""

from pipeline_platform.testing.check import Report, check_source, promises_of
from pipeline_platform.testing.promise import BrokenPromiseError
from pipeline_platform.testing.server import PAYLOADS, TEXTS, Server

__all__ = ["PAYLOADS", "TEXTS", "BrokenPromiseError", "Report", "Server", "check_source", "promises_of"]
