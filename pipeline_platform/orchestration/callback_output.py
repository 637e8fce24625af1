"""What callbacks printed and logged, in the log of the run."""

import dagster as dg

from pipeline_platform.lake.manifest import Manifest


def log_output(context: dg.AssetExecutionContext, manifest: Manifest) -> None:
    """Log what the callbacks of a step said, task by task."""
    for notes in manifest.notes:
        if "said" in notes:
            more = f"and {notes['unsaid']} more lines, which are in Spark's log" if notes["unsaid"] else ""
            who = notes.get("who", f"callbacks of task {notes.get('task', '?')}")
            context.log.info(f"{who} said:\n{notes['said']}{more}".rstrip())
