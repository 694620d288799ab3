"""Parses and formats sizes and durations. Imports no torch."""

from __future__ import annotations

import math
import re

from autofit.exceptions import UsageError

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?|\.\d+)\s*(?P<unit>[a-z]*)", re.IGNORECASE)
_DURATION = re.compile(r"(?:(?P<h>[\d.]+)h)?(?:(?P<m>[\d.]+)m)?(?:(?P<s>[\d.]+)s?)?", re.IGNORECASE)
_PREFIXES = "kmgtp"
PLAIN = 1 << 20
"""Bytes that may be written without a unit: no smaller number is meant as bytes."""
_FACTORS = (
    {"": 1, "b": 1}
    | {f"{p}ib": 1024**power for power, p in enumerate(_PREFIXES, 1)}
    | {p: 1024**power for power, p in enumerate(_PREFIXES, 1)}
    | {f"{p}b": 1000**power for power, p in enumerate(_PREFIXES, 1)}
)


def parse_size(text: str) -> int:
    """Return the bytes in ``text``: ``24GiB``, ``1.5GB``, ``800M`` or plain bytes.

    ``GiB`` and ``G`` are powers of 1024, ``GB`` powers of 1000; case does not matter.
    Raises ``UsageError`` for anything else, zero included, and for a number below ``PLAIN`` without
    a unit: in ``--memory 24`` the unit was forgotten.

    >>> parse_size("24GiB")
    25769803776
    >>> parse_size("16GB")
    16000000000
    """
    match = _SIZE.fullmatch(text.strip())
    factor = _FACTORS.get(match["unit"].lower()) if match else None
    number = float(match["number"]) * factor if match and factor else 0.0
    size = int(number) if number < math.inf else 0
    if size < 1 or (match and not match["unit"] and size < PLAIN):
        raise UsageError(
            f"{text!r} is not a size: write a number with a unit such as 24GiB, 800MiB or 16GB"
        )
    return size


def format_size(size: float) -> str:
    """Return ``size`` bytes in the largest binary unit that gives at least 1: ``24.0 GiB``."""
    power = 0
    while abs(size) >= 1023.95 and power < len(_PREFIXES):  # 1023.95 would be printed as 1024.0
        size /= 1024
        power += 1
    return f"{size:.1f} {_PREFIXES[power - 1].upper()}iB" if power else f"{size:.0f} B"


def exact_size(size: int) -> str:
    """Return the shortest text that ``parse_size`` reads as ``size`` bytes: ``24GiB``.

    >>> exact_size(25769803776)
    '24GiB'
    """
    power = next(p for p in range(len(_PREFIXES), -1, -1) if size % 1024**p == 0)
    return f"{size // 1024**power}{_PREFIXES[power - 1].upper()}iB" if power else str(size)


def parse_duration(text: str) -> float:
    """Return the seconds in ``text``: ``45``, ``90s``, ``10m``, ``1h30m``.

    Raises ``UsageError`` for anything else, zero included.

    >>> parse_duration("1h30m")
    5400.0
    """
    match = _DURATION.fullmatch(text.strip())
    try:
        parts = [float(match[unit] or 0) if match else 0.0 for unit in "hms"]
    except ValueError:
        parts = []
    seconds = sum(part * factor for part, factor in zip(parts, (3600, 60, 1), strict=False))
    if not 0 < seconds < math.inf:
        raise UsageError(f"{text!r} is not a duration: write one such as 90s, 10m or 1h30m")
    return seconds


def format_duration(seconds: float) -> str:
    """Return ``seconds`` in its two largest units: ``0.8 s``, ``45 s``, ``1 min 52 s``, ``2 h``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        parts = ((whole // 60, "min"), (whole % 60, "s"))
    else:
        minutes = round(seconds / 60)
        parts = ((minutes // 60, "h"), (minutes % 60, "min"))
    return " ".join(f"{count} {unit}" for count, unit in parts if count)
