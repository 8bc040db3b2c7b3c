"""Every Python block of the documents runs, those of one file in order and in one namespace."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^(?P<fence>`{3,})python[^\n]*\n(?P<code>.*?)^(?P=fence)[ \t]*$", re.MULTILINE | re.DOTALL)


def blocks(document: Path) -> list[str]:
    """The blocks, each moved down to the line it has in the document, so that tracebacks point there."""
    text = document.read_text(encoding="utf-8")
    return ["\n" * text.count("\n", 0, found.start("code")) + found["code"] for found in BLOCK.finditer(text)]


DOCUMENTS = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if blocks(path)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_examples_of_a_document_run(document: Path) -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    for code in blocks(document):
        exec(compile(code, document, "exec"), namespace)


def test_the_readme_has_an_example() -> None:
    assert ROOT / "README.md" in DOCUMENTS
