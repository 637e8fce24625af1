"""Alias of `pipeline_platform.sql.database`, for connectors that import `Database` from here."""

from pipeline_platform.sql.database import Database

__all__ = ["Database"]
