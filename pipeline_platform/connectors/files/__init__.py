"""Files of a folder or an object store as a source of their rows."""

from pipeline_platform.connectors.files.file_source import FileSource

__all__ = ["FileSource"]
