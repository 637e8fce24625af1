"""Answers in CONTRIBUTING.md, which name existing functions."""

import ast
import re

import pytest

from tests.fixtures.keeper import PROJECT

ANSWERS = (PROJECT / "CONTRIBUTING.md").read_text().partition("## Where do I find ...?")[2]
QUESTIONS = dict(re.findall(r"^\d+\. \*\*(.+?)\*\*(.+?)(?=^\d+\. |\Z)", ANSWERS, re.M | re.S))
NAME = re.compile(r"`([\w/]+\.py)(?::([\w.]+))?`")


def defined(file: str) -> set[str]:
    """Return the functions and classes of a file, and methods by their classes."""
    tree = ast.parse((PROJECT / "pipeline_platform" / file).read_text())
    kinds = (ast.FunctionDef, ast.ClassDef)
    tops = [top for top in tree.body if isinstance(top, kinds)]
    methods = {f"{top.name}.{inner.name}" for top in tops for inner in top.body if isinstance(inner, kinds)}
    return {top.name for top in tops} | methods


@pytest.mark.parametrize("question", QUESTIONS)
def test_an_answer_names_existing_functions_in_at_most_five_files(question):
    named = NAME.findall(QUESTIONS[question])
    assert [f"{file}:{name}" for file, name in named if name not in {"", *defined(file)}] == []
    assert 2 <= len({file for file, _ in named}) <= 5


def test_it_answers_eleven_questions():
    assert len(QUESTIONS) == 11
