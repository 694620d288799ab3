"""The shell's completion, as bash asks for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.quick
CODE = "import sys; from autofit.cli import main; sys.exit(main())"


def completed(*words: str) -> set[str]:
    """Return what bash offers for the last of the words."""
    shell = {
        "_AUTOFIT_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", CODE], env={**os.environ, **shell}, capture_output=True, text=True
    )
    return {line.partition(",")[2] for line in done.stdout.splitlines()}


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("autofit", "sea"), {"search"}),
        (("autofit", "history", "sh"), {"show"}),
        (("autofit", "search", "--mem"), {"--memory"}),
        (("autofit", "search", "--only", "ch"), {"checkpointing"}),
        (("autofit", "search", "--allow", "re"), {"redraw", "recipe"}),
        (("autofit", "best", "--format", "li"), {"lightning"}),
    ],
)
def test_a_word_is_completed(words: tuple[str, ...], offered: set[str]) -> None:
    assert completed(*words) == offered
