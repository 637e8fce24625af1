"""Slow tasks, from the UI of a Connect server; a cluster with slow tasks is in `test_spark_cluster.py`."""

from pipeline_platform.spark import late_tasks


def test_a_ui_that_does_not_answer_names_nothing():
    assert late_tasks.late_tasks("http://127.0.0.1:1", "late") == ""
