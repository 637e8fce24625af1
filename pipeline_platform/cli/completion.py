"""Completion of names in the shell."""

from pipeline_platform.cli import loading


def pipeline_names(incomplete: str) -> list[str]:
    """Return the pipelines of the deployment here whose names start with a text; none if it cannot be loaded."""
    try:
        names = [pipeline.name for pipeline in loading.load().pipelines]
    except Exception:  # a shell cannot show the error of a completion; the command itself does
        return []
    return [name for name in names if name.startswith(incomplete)]
