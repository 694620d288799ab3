"""Click's options: sizes, durations, strategies. A value that cannot be read ends with exit code 2.

Click callbacks import their parser only when the option is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import Field
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from autofit.exceptions import UsageError
from autofit.flags import PREFERENCES, Flag, ValueKind, default_of, flag_name, flags_of
from autofit.text import did_you_mean

T = TypeVar("T")
F = TypeVar("F", bound=click.Command)


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
    """Return the given names; an unknown one is a usage error that lists the known names."""
    if not value:
        return frozenset()
    from autofit.strategies import get

    with _usage_errors(param):
        return frozenset(get(name).name for name in value)


class Choice(click.Choice[str]):
    """A choice whose error suggests the name that was probably meant."""

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Return the name, or end with a usage error that suggests one."""
        try:
            return str(super().convert(str(value), param, ctx))
        except click.BadParameter as error:
            hint = did_you_mean(str(value), self.choices)
            message = f"{error.message.rstrip('.')}; {hint}" if hint else error.message
            raise click.BadParameter(message, ctx, param) from None


class FidelityName(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.3 on
    """The name of a fidelity; the strategies are imported only when it is read or shown."""

    name = "fidelity"

    def _choice(self) -> Choice:
        from autofit.strategies import Fidelity

        return Choice([str(each) for each in Fidelity])

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        """Return ``[exact|redraw|...]``."""
        return self._choice().get_metavar(param, ctx)

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Return the name, or end with a usage error that lists the names."""
        return self._choice().convert(value, param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the names that begin with ``incomplete``."""
        return self._choice().shell_complete(ctx, param, incomplete)


def _strategy_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from autofit.strategies import NAMES

    return [name for name in NAMES if name.startswith(incomplete)]


_KINDS: dict[ValueKind, dict[str, Any]] = {
    ValueKind.SIZE: {"callback": size},
    ValueKind.DURATION: {"callback": duration},
    ValueKind.COUNT: {"type": click.IntRange(min=1)},
    ValueKind.PERCENT: {"type": click.FloatRange(min=0, max=100, max_open=True)},
    ValueKind.FIDELITY: {"type": FidelityName()},
    ValueKind.PREFERENCE: {"type": click.Choice(PREFERENCES)},
    ValueKind.STRATEGIES: {
        "multiple": True,
        "callback": strategies,
        "shell_complete": _strategy_names,
    },
    ValueKind.TEXT: {},
    ValueKind.SWITCH: {"is_flag": True},
}


class _LazyDefault(click.Option):
    """An option whose default is a function, which ``--help`` calls to show it."""

    def get_default(self, ctx: click.Context, call: bool = True) -> Any:
        """Return the default that the function returns."""
        return super().get_default(ctx, call=True)


def _option(each: Field[Any], flag: Flag) -> click.Option:
    name, settings = flag_name(each.name), dict(_KINDS[flag.kind])
    settings |= {"help": flag.help, "metavar": flag.metavar, "required": flag.required}
    if not flag.show_default:
        return click.Option([name], **settings)
    return _LazyDefault([name], default=partial(_default, each), show_default=True, **settings)


def _default(each: Field[Any]) -> Any:
    """Return the default of a field as it is written on the command line."""
    default = default_of(each)
    return str(default) if isinstance(default, Enum) else default


def options_of(options: type) -> Callable[[F], F]:
    """Return a decorator that gives a command an option for each field with a flag."""

    def give(command: F) -> F:
        command.params[:0] = [_option(each, flag) for each, flag in flags_of(options)]
        return command

    return give


def url_of(storage: str | None) -> str:
    """Return the URL of the store for ``--storage``, which is a URL or a file's path."""
    from autofit.storage.url import default_url, to_url

    return default_url() if storage is None else to_url(storage)


def _parsed(parse: Callable[[str], T], value: str | None, param: click.Parameter) -> T | None:
    if value is None:
        return None
    with _usage_errors(param):
        return parse(value)


@contextmanager
def _usage_errors(param: click.Parameter) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise click.BadParameter(str(error), param=param) from None
