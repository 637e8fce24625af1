"""Slow tasks, from the UI of a Connect server; a cluster with slow tasks is in `test_spark_cluster.py`."""

import pytest

from pipeline_platform.spark import late_tasks


@pytest.mark.parametrize("answer", [[], "", None, 7, [None], [{"id": "app"}]])
def test_a_ui_with_other_answers_names_nothing(monkeypatch, answer):
    monkeypatch.setattr(late_tasks, "_asked", lambda url: answer)
    assert late_tasks.late_tasks("http://127.0.0.1:1", "late") == ""


def test_a_ui_that_does_not_answer_names_nothing():
    assert late_tasks.late_tasks("http://127.0.0.1:1", "late") == ""
