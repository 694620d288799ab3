"""The blocks of commands in the documentation, and which of them a test runs.

A block that begins with ```` ```sh ```` is run, unless a comment in the line above says otherwise:
``<!-- not run: needs a GPU -->`` or ``<!-- fails -->``, for a block that has to fail.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.docs.prose import ROOT, pages

_BLOCK = re.compile(r"(?:^<!-- ([^\n]*?) -->\n)?^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of commands."""

    page: str
    """Path in the repository."""
    comment: str
    """The comment above it, empty where there is none."""
    commands: str

    @property
    def runs(self) -> bool:
        """Whether a test runs it."""
        return not self.comment.startswith("not run: ")

    @property
    def fails(self) -> bool:
        """Whether it has to fail."""
        return self.comment == "fails"


def blocks() -> list[Block]:
    """Return the blocks of all pages, in order."""
    return [block for page in pages() for block in blocks_of(page)]


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of one page, in order."""
    name = str(page.relative_to(ROOT))
    found = _BLOCK.findall(page.read_text(encoding="utf-8"))
    return [Block(name, comment, commands) for comment, commands in found]
