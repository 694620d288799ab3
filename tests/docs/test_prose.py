"""README.md and docs/ are written in short sentences; ``prose.py`` counts their words."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.prose import MOST_WORDS, ROOT, complaints, mean_words, pages, sentences

pytestmark = pytest.mark.quick

PAGE = """---
title: not counted
---
# Not counted either

One two three. Four `five is one` six, e.g. [seven](page.md#eight)! Nine
ten?

```sh
not counted. At all.
```

| not | counted. |

<!-- not
counted. -->
- eleven
- twelve: **thirteen.** Fourteen
  fifteen.
"""


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_short(page: Path) -> None:
    found = complaints(page)
    assert not found, "\n".join(found)


def test_what_is_counted() -> None:
    found = [(sentence.line, sentence.text, sentence.words) for sentence in sentences(PAGE)]
    assert found == [
        (6, "One two three.", 3),
        (6, "Four `five is one` six, e.g. seven!", 5),
        (6, "Nine ten?", 2),
        (17, "eleven", 1),
        (18, "twelve: **thirteen.", 2),
        (18, "Fourteen fifteen.", 2),
    ]
    assert mean_words(sentences(PAGE)) == pytest.approx(15 / 6)


def test_a_complaint_names_page_line_and_sentence(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nShort.\n\n" + "word " * MOST_WORDS + "more.\n")
    long, mean = complaints(page)
    assert long.startswith(f"{page}:5: 36 words, 35 allowed: word word")
    assert mean == f"{page}: 18.5 words a sentence on average, 18 allowed"
