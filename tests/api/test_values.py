"""Values of options, as people write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from autofit.api.values import parse
from autofit.exceptions import UsageError
from autofit.flags import Kind
from autofit.strategies import Fidelity

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("kind", "given", "value"),
    [
        (Kind.SIZE, "24GiB", 24 << 30),
        (Kind.SIZE, 1000, 1000),
        (Kind.SIZE, 2e9, 2_000_000_000),
        (Kind.DURATION, "1h30m", 5400.0),
        (Kind.DURATION, 0.5, 0.5),
        (Kind.COUNT, 3, 3),
        (Kind.PERCENT, 0, 0.0),
        (Kind.FIDELITY, "exact", Fidelity.EXACT),
        (Kind.FIDELITY, Fidelity.RECIPE, Fidelity.RECIPE),
        (Kind.STRATEGIES, "precision", frozenset({"precision"})),
        (Kind.STRATEGIES, ["precision", "loss"], frozenset({"precision", "loss"})),
        (Kind.STRATEGIES, (), frozenset()),
        (Kind.TEXT, Path("autofit.db"), "autofit.db"),
        (Kind.SWITCH, True, True),
        (Kind.SIZE, None, None),
    ],
)
def test_a_value_is_read(kind: Kind, given: object, value: object) -> None:
    assert parse("x", given, kind) == value


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (Kind.SIZE, "banana", "such as 24GiB"),
        (Kind.SIZE, 0, "a number of bytes from 1"),
        (Kind.SIZE, 1.5, "a number of bytes from 1"),
        (Kind.SIZE, True, "a number of bytes from 1"),
        (Kind.SIZE, float("nan"), "a number of bytes from 1"),
        (Kind.DURATION, "soon", "such as 90s"),
        (Kind.DURATION, 0, "seconds above 0"),
        (Kind.DURATION, float("inf"), "seconds above 0"),
        (Kind.COUNT, "3", "a whole number from 1"),
        (Kind.COUNT, 0, "a whole number from 1"),
        (Kind.COUNT, 1.0, "a whole number from 1"),
        (Kind.PERCENT, 100, "below 100"),
        (Kind.FIDELITY, "exakt", "did you mean 'exact'?"),
        (Kind.FIDELITY, 1, "allowed are exact, redraw, rounding, recipe"),
        (Kind.STRATEGIES, "checkpoint", "did you mean 'checkpointing'?"),
        (Kind.STRATEGIES, 3, "a list of names"),
        (Kind.TEXT, 3, "write a text"),
        (Kind.SWITCH, 1, "True or False"),
    ],
)
def test_a_wrong_value_says_what_is_allowed(kind: Kind, given: object, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse("option", given, kind)
    assert str(raised.value).startswith(f"option={given!r}: ")
    assert said in str(raised.value)
