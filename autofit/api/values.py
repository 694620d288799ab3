"""Reads the values of options as people write them: ``"24GiB"``, ``"10m"``, ``"rounding"``."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from typing import Any

from autofit.exceptions import UsageError
from autofit.flags import PREFERENCES, ValueKind
from autofit.strategies import Fidelity, get
from autofit.text import did_you_mean
from autofit.units import parse_duration, parse_size


def parse(name: str, value: Any, kind: ValueKind) -> Any:
    """Return the value of an option as ``SearchOptions`` holds it.

    ``None`` stays. Raises ``UsageError``, which names the option, for a value that is not allowed.

    >>> parse("memory", "24GiB", ValueKind.SIZE)
    25769803776
    >>> parse("allow", "recipe", ValueKind.FIDELITY)
    <Fidelity.RECIPE: 3>
    """
    if value is None:
        return None
    try:
        return _PARSERS[kind](value)
    except UsageError as error:
        raise UsageError(f"{name}={value!r}: {error}") from None


def _size(value: object) -> int:
    if isinstance(value, str):
        return parse_size(value)
    number = _number(value)
    if number is not None and number >= 1 and number == int(number):
        return int(number)
    raise UsageError("write a number of bytes from 1, or a text such as '24GiB'")


def _duration(value: object) -> float:
    if isinstance(value, str):
        return parse_duration(value)
    number = _number(value)
    if number is not None and number > 0:
        return number
    raise UsageError("write a number of seconds above 0, or a text such as '1h30m'")


def _count(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise UsageError("write a whole number from 1")


def _percent(value: object) -> float:
    number = _number(value)
    if number is not None and 0 <= number < 100:
        return number
    raise UsageError("write a number from 0, below 100")


def _fidelity(value: object) -> Fidelity:
    if isinstance(value, Fidelity):
        return value
    names = [str(each) for each in Fidelity]
    if isinstance(value, str) and value in names:
        return Fidelity[value.upper()]
    hint = did_you_mean(value, names) if isinstance(value, str) else ""
    raise UsageError(f"allowed are {', '.join(names)}" + (f"; {hint}" if hint else ""))


def _preference(value: object) -> str:
    if isinstance(value, str) and value in PREFERENCES:
        return value
    raise UsageError(f"allowed are {', '.join(PREFERENCES)}")


def _strategies(value: object) -> frozenset[str]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, Iterable):
        raise UsageError("write the name of a technique, or a list of names")
    return frozenset(get(str(name)).name for name in names)


def _text(value: object) -> str:
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    raise UsageError("write a text")


def _switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise UsageError("write True or False")


def _number(value: object) -> float | None:
    """Return a finite number as it is, and ``None`` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


_PARSERS: dict[ValueKind, Callable[[object], Any]] = {
    ValueKind.SIZE: _size,
    ValueKind.DURATION: _duration,
    ValueKind.COUNT: _count,
    ValueKind.PERCENT: _percent,
    ValueKind.FIDELITY: _fidelity,
    ValueKind.PREFERENCE: _preference,
    ValueKind.STRATEGIES: _strategies,
    ValueKind.TEXT: _text,
    ValueKind.SWITCH: _switch,
}
