"""The blocks of commands in the documentation, and what they print.

A block that begins with ```` ```sh ```` is run as printed. A block ```` ```output ```` is what the
last commands above it print: see ``printed.py``. A block of another language with a title, such as
```` ```toml title="plan.toml" ````, is a file that the commands of the page find.

A comment in the line above a block of commands says otherwise:
``<!-- not run: needs a GPU -->``, ``<!-- fails -->`` for a block that has to fail, or
``<!-- runs until the page ends -->`` for a server, whose output the next block waits for.

    python -m tests.docs.blocks
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from tests.docs.prose import ROOT, pages

_FENCE = re.compile(
    r'(?:^<!-- ([^\n]*?) -->\n)?^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$',
    re.MULTILINE | re.DOTALL,
)
_SOURCES = ("autofit", "storage", "strategies", "worker", "examples")
_COMMAND = re.compile(r"(?:^\n)((?:^    (?:autofit|python|torchrun) .*\n)+)", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of commands."""

    page: str
    """Path in the repository."""
    comment: str
    """The comment above it, empty where there is none."""
    commands: str
    output: str = ""
    """What the page says that they print, empty where it does not."""
    files: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Names and contents of the files that the page shows above it."""

    @property
    def reason(self) -> str:
        """Why no test runs it, empty where one does."""
        before, _, reason = self.comment.partition("not run: ")
        return "" if before else reason

    @property
    def fails(self) -> bool:
        """Whether it has to fail."""
        return self.comment == "fails"

    @property
    def stays(self) -> bool:
        """Whether its commands run until the page ends."""
        return self.comment == "runs until the page ends"


@cache
def blocks() -> tuple[Block, ...]:
    """Return the blocks of all documents and docstrings, in order."""
    documents = [*pages(), ROOT / "examples/README.md"]
    return tuple(block for page in documents for block in blocks_of(page)) + tuple(_in_docstrings())


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of one document, in order."""
    found, files = list[Block](), dict[str, str]()
    name = str(page.relative_to(ROOT))
    for comment, language, title, content in fences(page):
        if language == "sh":
            found.append(Block(name, comment, content, files=tuple(files.items())))
        elif language == "output":
            assert found, f"{name}: no command prints this:\n{content}"
            assert not found[-1].output, f"{name}: two outputs of the same commands:\n{content}"
            found[-1] = replace(found[-1], output=content)
        elif title:
            files[title] = content
    return found


def fences(page: Path) -> list[tuple[str, str, str, str]]:
    """Return comment, language, title and content of each block of a document."""
    return _FENCE.findall(page.read_text(encoding="utf-8"))


def _in_docstrings() -> Iterator[Block]:
    """Yield the commands in docstrings: lines that are indented below an empty one."""
    for top in _SOURCES:
        for file in sorted((ROOT / top).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    for commands in _COMMAND.findall(f"{ast.get_docstring(node) or ''}\n"):
                        yield Block(str(file.relative_to(ROOT)), "", commands)


def main() -> None:
    """Print how many blocks are run and compared, and why the others are not."""
    found = blocks()
    run = [block for block in found if not block.reason]
    print(f"{len(found)} blocks of commands; {len(run)} are run as printed")
    print(f"{sum(bool(block.output) for block in run)} of these have an output, which is compared")
    for reason, count in Counter(block.reason for block in found if block.reason).most_common():
        print(f"{count:3d} not run: {reason}")


if __name__ == "__main__":
    main()
