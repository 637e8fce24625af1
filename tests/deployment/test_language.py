"""The rules of docs/contributing/language.md that a program can check."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
EXCEPTIONS = Path(__file__).with_name("language_exceptions.txt")
MOST_EXCEPTIONS = 40
CODE = [path for path in sorted(ROOT.glob("[!.]*/**/*.py")) if "node_modules" not in path.parts]
CODE.append(ROOT / "definitions.py")
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("deploy/**/*.md")]
)
DOCUMENTS += [
    *(ROOT / name for name in ("Makefile", "pyproject.toml", "dagster.yaml", "workspace.yaml", ".ci/run")),
    *sorted(path for path in (ROOT / "deploy").rglob("*") if path.is_file() and path.suffix != ".md"),
]
"""Files with comments for users."""
RULES = ROOT / "docs" / "contributing" / "language.md"
"""The page that quotes the forbidden words."""

OPENINGS = re.compile(r"(What|Which|Where|Who|Whose|Whom|How)\b")
PHRASES = re.compile(
    r"\b(is no|are no|that are none|whoever|nobody|anew|mend|mends|mended|by hand|at the most"
    r"|comes? again|came again|is over|are over|gives? back|given back|gave back|takes? on|taken on|took on)\b",
    re.IGNORECASE,
)
IDIOMATIC = re.compile(
    r"\b(?:there (?:is|are) no|(?:is|are) no (?:longer|more|fewer|less|later|earlier)) ?\b", re.IGNORECASE
)
"""Plain English that contains a forbidden phrase."""


class Violation(NamedTuple):
    """A place that breaks a rule: file, line number and the words."""

    file: str
    line: int
    words: str

    @property
    def key(self) -> str:
        """The form in which the list of exceptions names it."""
        return f"{self.file}: {self.words}"


def violations(path: Path) -> Iterator[Violation]:
    """Yield the violations of a file."""
    file, text = path.relative_to(ROOT).as_posix(), path.read_text()
    for line, words in _of_code(text, file.startswith("tests/")) if path.suffix == ".py" else _phrases(text):
        yield Violation(file, line, words)


def _phrases(text: str, line: int = 1) -> Iterator[tuple[int, str]]:
    plain = IDIOMATIC.sub(lambda found: "\n" * found[0].count("\n"), text)
    for found in PHRASES.finditer(plain):
        yield line + plain.count("\n", 0, found.start()), " ".join(found[0].lower().split())


def _of_code(text: str, is_test: bool) -> Iterator[tuple[int, str]]:
    tree = ast.parse(text)
    documented, strings = set[ast.expr](), list[ast.Constant]()
    for node in ast.walk(tree):
        for statement in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(docstring)) as constant):
                    documented.add(constant)
                    if opening := OPENINGS.match(docstring.strip()):
                        yield constant.lineno, f"a docstring that starts with {opening[0]}"
                    yield from _phrases(docstring, constant.lineno)
        match node:
            case ast.Name(id="one", ctx=ast.Store()) | ast.arg(arg="one"):
                yield node.lineno, "a variable called one"
            case ast.Constant(value=str()):
                strings.append(node)
    if is_test:
        return
    for string in strings:
        if string not in documented:
            yield from _phrases(str(string.value), string.lineno)
    if not any(PHRASES.search(line.partition("#")[2]) for line in text.splitlines()):
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from _phrases(token.string, token.start[0])


def exceptions() -> dict[str, str]:
    """Return the reason of each exception, by file and words."""
    lines = [line for line in EXCEPTIONS.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("  -- ") for line in lines)  # type: ignore[misc]


def test_text_follows_the_language_rules_with_few_exceptions_each_of_which_is_needed():
    allowed = exceptions()
    found = [violation for path in [*CODE, *DOCUMENTS] if path != RULES for violation in violations(path)]
    assert [violation for violation in found if violation.key not in allowed] == []
    assert len(allowed) <= MOST_EXCEPTIONS
    assert {*allowed} <= {violation.key for violation in found}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('"""What a run holds."""', ["a docstring that starts with What"]),
        ('x: int\n"""Where it is."""', ["a docstring that starts with Where"]),
        ('"""Whether it is decided."""', []),
        ('raise ValueError("the payload is no JSON")', ["is no"]),
        ('raise ValueError(f"the payload {x} is\\n no longer there; there is no queue")', []),
        ("for one in files:\n    pass", ["a variable called one"]),
        ("f(lambda one: 1)", ["a variable called one"]),
        ("# It comes again.", ["comes again"]),
    ],
)
def test_a_violation_is_found(text, words):
    assert [found for _, found in _of_code(text, is_test=False)] == words
