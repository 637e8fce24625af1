"""Earlier place of `pipeline_platform.sql.database`, for connectors that import it from here."""

from pipeline_platform.sql.database import Database

__all__ = ["Database"]
