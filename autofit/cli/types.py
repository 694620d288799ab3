"""What options mean: sizes, durations, strategies. A bad one ends with exit code 2.

Used as Click callbacks, so that what parses is imported only when an option is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import click

from autofit.exceptions import UsageError

T = TypeVar("T")


def size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Return bytes for ``"24GiB"``."""
    from autofit.units import parse_size

    return _parsed(parse_size, value, param)


def duration(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Return seconds for ``"1h30m"``."""
    from autofit.units import parse_duration

    return _parsed(parse_duration, value, param)


def strategies(
    ctx: click.Context, param: click.Parameter, value: tuple[str, ...]
) -> frozenset[str]:
    """Return the names given; those the catalogue lacks are refused with those it has."""
    if not value:
        return frozenset()
    from autofit.strategies import get

    with _bad(param):
        return frozenset(get(name).name for name in value)


def url_of(storage: str | None) -> str:
    """Return the store's URL for what ``--storage`` was given, a path of a file included."""
    from autofit.storage.url import default_url, to_url

    return default_url() if storage is None else to_url(storage)


def _parsed(parse: Callable[[str], T], value: str | None, param: click.Parameter) -> T | None:
    if value is None:
        return None
    with _bad(param):
        return parse(value)


@contextmanager
def _bad(param: click.Parameter) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise click.BadParameter(str(error), param=param) from None
