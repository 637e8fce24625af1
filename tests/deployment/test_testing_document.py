"""What `docs/build/testing.md` shows is run, on the README's pipeline."""

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.deployment.test_documents import shown

DOCUMENT = (Path(__file__).parents[2] / "docs" / "build" / "testing.md").read_text()


@pytest.mark.parametrize("test", re.findall(r"^def (test_\w+)", DOCUMENT, re.M))
def test_its_examples_pass(test: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    departures = ModuleType("pipelines.departures")
    vars(departures).update(shown("class Departures(Pipeline)"))
    monkeypatch.setitem(sys.modules, "pipelines.departures", departures)
    (tmp_path / "test_of_the_document.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", DOCUMENT, re.S)))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "test_of_the_document", raising=False)

    example: Callable[[], None] = vars(importlib.import_module("test_of_the_document"))[test]

    example()
