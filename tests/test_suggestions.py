"""Which known name a misspelt one stands for."""

from __future__ import annotations

import pytest

from autofit.exceptions import UsageError
from autofit.plan import Plan
from autofit.strategies import NAMES
from autofit.text import closest, did_you_mean

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("checkpoint", "checkpointing"),
        ("precison", "precision"),
        ("Precision", "precision"),
        ("micro-batch", "micro_batch"),
        ("offload", "optimizer_offload"),
        ("banana", None),
        ("", None),
    ],
)
def test_the_closest_strategy(word: str, name: str | None) -> None:
    assert closest(word, NAMES) == name


def test_a_level_is_suggested_too() -> None:
    with pytest.raises(UsageError, match=r"precision has no level 'bf'; did you mean 'bf16'\?"):
        Plan.of({"precision": "bf"})
    with pytest.raises(UsageError, match="precision has no level 'banana'; it has as_is, "):
        Plan.of({"precision": "banana"})


def test_no_suggestion_is_an_empty_text() -> None:
    assert did_you_mean("banana", NAMES) == ""
