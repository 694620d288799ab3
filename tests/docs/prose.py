"""Counts the words of each sentence in the documentation.

    python -m tests.docs.prose              # one line a page, then each sentence that is too long
    python -m tests.docs.prose docs/tutorials/cluster.md

Code blocks, tables, headings, comments and front matter do not count. Each list item starts a new
sentence. Inline code counts as one word, and the target of a link as none.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

MOST_WORDS = 35
MOST_ON_AVERAGE = 18

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"\s*(```|~~~)")
_ITEM = re.compile(r"\s*([-*+]|\d+\.)\s+")
_NOT_PROSE = re.compile(r"\s*(#|\||!!!|\?\?\?|<)")
_LINK = re.compile(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])")
_CODE = re.compile(r"`+[^`]+`+")
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|vs)\.")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')*_]*\s+")


@dataclass(frozen=True)
class Sentence:
    """A sentence, the line of its paragraph (from 1), and its length in words."""

    line: int
    text: str

    @property
    def words(self) -> int:
        """Count what has a letter or a digit between two spaces; inline code is one word."""
        return sum(any(map(str.isalnum, word)) for word in _CODE.sub("code", self.text).split())


def pages(root: Path = ROOT) -> list[Path]:
    """Return README.md and every page under docs/."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def sentences(markdown: str) -> list[Sentence]:
    """Return the sentences of a page, in order."""
    return [
        Sentence(line, sentence)
        for line, paragraph in _paragraphs(markdown)
        for sentence in _split(paragraph)
    ]


def mean_words(found: list[Sentence]) -> float:
    """Return the mean length of the sentences in words, 0 for a page without any."""
    return fmean(sentence.words for sentence in found) if found else 0.0


def complaints(path: Path) -> list[str]:
    """Return one line for each sentence that is too long, and one for a page mean too high."""
    found = sentences(path.read_text(encoding="utf-8"))
    lines = [
        f"{path}:{sentence.line}: {sentence.words} words, {MOST_WORDS} allowed: {sentence.text}"
        for sentence in found
        if sentence.words > MOST_WORDS
    ]
    if (mean := mean_words(found)) > MOST_ON_AVERAGE:
        lines.append(f"{path}: {mean:.1f} words a sentence on average, {MOST_ON_AVERAGE} allowed")
    return lines


def _paragraphs(markdown: str) -> Iterator[tuple[int, str]]:
    """Yield the first line's number and the text of each paragraph and list item."""
    begin, parts = 0, list[str]()
    for number, line in _prose_lines(markdown):
        item = _ITEM.match(line)
        if parts and (item or not line.strip()):
            yield begin, " ".join(parts)
            parts = []
        if text := (line[item.end() :] if item else line).strip():
            begin = begin if parts else number
            parts.append(text)
    if parts:
        yield begin, " ".join(parts)


def _prose_lines(markdown: str) -> Iterator[tuple[int, str]]:
    """Yield each line with its number; a line that is no prose is yielded as an empty one."""
    # Blanked and not removed: the line numbers stay right.
    markdown = re.sub(
        r"\A---\n.*?\n---\n|<!--.*?-->|<svg.*?</svg>",
        lambda match: re.sub(r"[^\n]", "", match[0]),
        markdown,
        flags=re.DOTALL,
    )
    fence = ""
    for number, line in enumerate(markdown.splitlines(), 1):
        mark = _FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1] == fence:
            fence = ""
        elif not fence and not _NOT_PROSE.match(line):
            yield number, line
            continue
        yield number, ""


def _split(paragraph: str) -> list[str]:
    """Split a paragraph at the ends of its sentences; no sentence ends within inline code."""
    text = _LINK.sub(r"\1", paragraph)
    code = iter(_CODE.findall(text))
    text = _ABBREVIATION.sub(r"\1\0", _CODE.sub("\1", text))
    return [
        re.sub("\1", lambda _: next(code), part).replace("\0", ".")
        for part in _SENTENCE_END.split(text)
        if part.strip()
    ]


def main(arguments: list[str]) -> int:
    """Print each page's sentences, words and mean, then what is too long; 1 where anything is."""
    paths = [Path(argument) for argument in arguments] or pages()
    for path in paths:
        found = sentences(path.read_text(encoding="utf-8"))
        words = sum(sentence.words for sentence in found)
        print(f"{words:6d} words {len(found):5d} sentences {mean_words(found):5.1f}  {path}")
    lines = [line for path in paths for line in complaints(path)]
    print(*lines, sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
