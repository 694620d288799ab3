"""Sizes and durations, both ways."""

from __future__ import annotations

import pytest

from autofit.exceptions import UsageError
from autofit.units import exact_size, format_duration, format_size, parse_duration, parse_size

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * 1024**3),
        ("24 gib", 24 * 1024**3),
        ("300MiB", 300 * 1024**2),
        ("800M", 800 * 1024**2),
        ("1.5GB", 1_500_000_000),
        ("16kb", 16_000),
        ("2000000", 2_000_000),
        (" 12b ", 12),
    ],
)
def test_a_size_is_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (24 * 1024**3, "24GiB"),
        (1536 * 1024**2, "1536MiB"),
        (1024**4, "1TiB"),
        (16_000_000_001, "16000000001"),
    ],
)
def test_a_size_is_written_so_that_it_is_read_as_the_same(size: int, text: str) -> None:
    assert exact_size(size) == text
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["banana", "", "0", "24", "1.5", "-1GiB", "1e9", "12 bananas", "GiB", "0.1B"]
)
def test_what_is_no_size_says_what_one_looks_like(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    assert str(caught.value) == (
        f"{text!r} is not a size: write a number with a unit such as 24GiB, 800MiB or 16GB"
    )


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1024, "1.0 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (24 * 1024**3, "24.0 GiB"),
        (int(1.5 * 1024**4), "1.5 TiB"),
        (-(300 * 1024**2), "-300.0 MiB"),
    ],
)
def test_a_size_is_written(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10m", 600), ("90s", 90), ("1h30m", 5400), ("45", 45), ("1h5s", 3605), ("0.5m", 30)],
)
def test_a_duration_is_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "10x", "0", "-5", "1.2.3s", "30m1h", "inf"])
def test_what_is_no_duration_says_what_one_looks_like(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not a duration: write one such as 90s, 10m or 1h30m"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.84, "0.8 s"),
        (9.96, "10 s"),
        (45.2, "45 s"),
        (60, "1 min"),
        (112, "1 min 52 s"),
        (3599.7, "1 h"),
        (5400, "1 h 30 min"),
        (7200, "2 h"),
    ],
)
def test_a_duration_is_written(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
