"""Values of options, as people write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from autofit.api.values import parse
from autofit.exceptions import UsageError
from autofit.flags import ValueKind
from autofit.strategies import Fidelity

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("kind", "given", "value"),
    [
        (ValueKind.SIZE, "24GiB", 24 << 30),
        (ValueKind.SIZE, 1000, 1000),
        (ValueKind.SIZE, 2e9, 2_000_000_000),
        (ValueKind.DURATION, "1h30m", 5400.0),
        (ValueKind.DURATION, 0.5, 0.5),
        (ValueKind.COUNT, 3, 3),
        (ValueKind.PERCENT, 0, 0.0),
        (ValueKind.FIDELITY, "exact", Fidelity.EXACT),
        (ValueKind.FIDELITY, Fidelity.RECIPE, Fidelity.RECIPE),
        (ValueKind.STRATEGIES, "precision", frozenset({"precision"})),
        (ValueKind.STRATEGIES, ["precision", "loss"], frozenset({"precision", "loss"})),
        (ValueKind.STRATEGIES, (), frozenset()),
        (ValueKind.TEXT, Path("autofit.db"), "autofit.db"),
        (ValueKind.SWITCH, True, True),
        (ValueKind.SIZE, None, None),
    ],
)
def test_a_value_is_read(kind: ValueKind, given: object, value: object) -> None:
    assert parse("x", given, kind) == value


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (ValueKind.SIZE, "banana", "such as 24GiB"),
        (ValueKind.SIZE, 0, "a number of bytes from 1"),
        (ValueKind.SIZE, 1.5, "a number of bytes from 1"),
        (ValueKind.SIZE, True, "a number of bytes from 1"),
        (ValueKind.SIZE, float("nan"), "a number of bytes from 1"),
        (ValueKind.DURATION, "soon", "such as 90s"),
        (ValueKind.DURATION, 0, "seconds above 0"),
        (ValueKind.DURATION, float("inf"), "seconds above 0"),
        (ValueKind.COUNT, "3", "a whole number from 1"),
        (ValueKind.COUNT, 0, "a whole number from 1"),
        (ValueKind.COUNT, 1.0, "a whole number from 1"),
        (ValueKind.PERCENT, 100, "below 100"),
        (ValueKind.FIDELITY, "exakt", "did you mean 'exact'?"),
        (ValueKind.FIDELITY, 1, "allowed are exact, redraw, rounding, recipe"),
        (ValueKind.STRATEGIES, "checkpoint", "did you mean 'checkpointing'?"),
        (ValueKind.STRATEGIES, 3, "a list of names"),
        (ValueKind.TEXT, 3, "write a text"),
        (ValueKind.SWITCH, 1, "True or False"),
    ],
)
def test_a_wrong_value_says_what_is_allowed(kind: ValueKind, given: object, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse("option", given, kind)
    assert str(raised.value).startswith(f"option={given!r}: ")
    assert said in str(raised.value)
