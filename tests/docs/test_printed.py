"""The comparison with a document forgives figures, and nothing else."""

from __future__ import annotations

import pytest

from tests.docs.printed import is_printed

pytestmark = pytest.mark.quick

ROW = "  1  bf16, micro 8      126 ±6      new     38.6 ####    fits  <- best\n"


@pytest.mark.parametrize(
    ("document", "output"),
    [
        ("step 3 loss 0.25\n", "step 12 loss 1e-05\n"),
        ("30.3 MiB of 1.0 GiB\n", "2.7 KiB of 1.0 GiB\n"),
        ("3 min 49 s; study bf19af38\n", "16 s; study c2e1ec84-2\n"),
        (ROW, " 2  checkpointing 1 block  2.387 ±0.119  ~-4 %  <0.001 #  fits (stopped early)\n"),
        ("a\n...\nc\n", "a\nb\nb\nc\n"),
        ("a ... c\n", "a b c\n"),
    ],
)
def test_figures_and_plans_may_differ(document: str, output: str) -> None:
    assert is_printed(document, output)


@pytest.mark.parametrize(
    ("document", "output"),
    [
        ("step 3 loss 0.25\n", "step 3 cost 0.25\n"),
        ("as printed\n", "as printed\nand more\n"),
        ("as printed\nand more\n", "as printed\n"),
        (ROW, ROW.replace("fits  <- best", "out of memory")),
        (ROW, ROW.replace("bf16, micro 8", "bf64, micro 8")),
    ],
)
def test_words_and_lines_may_not(document: str, output: str) -> None:
    assert not is_printed(document, output)
