"""Adds the decorator's arguments to those of a call. Imports no torch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, Self

from autofit.exceptions import UsageError

_BOUND = ("self", "cls")
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's module and qualified name."""
    inner = function.func if isinstance(function, functools.partial) else function
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    return f"{getattr(inner, '__module__', '?')}.{name}"


def parameters(function: Callable[..., Any]) -> list[Parameter]:
    """Return the parameters of ``function``; raise ``UsageError`` if it cannot be decorated."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise UsageError(
            f"{name_of(function)} is a generator, and a retry cannot undo what it has yielded:"
            " decorate a function that returns"
        )
    if inspect.iscoroutinefunction(function):
        raise UsageError(
            f"{name_of(function)} is a coroutine function: decorate the function without `async`"
            " that it calls for the training"
        )
    if isinstance(function, type) or not callable(function):
        raise UsageError(f"@resilient goes on a function, not on {function!r}")
    if isinstance(function, (staticmethod, classmethod)):
        kind = type(function).__name__
        raise UsageError(f"put @{kind} above @resilient, not below it")
    return list(inspect.signature(function).parameters.values())


def receiver_count(found: Sequence[Parameter]) -> int:
    """Return 1 if the first parameter is ``self`` or ``cls``, else 0."""
    return int(bool(found) and found[0].name in _BOUND)


@dataclass(frozen=True, slots=True)
class ArgumentPlace:
    """Where the decorator passes one value: at a position, or as a keyword."""

    name: str
    position: int | None
    """``None`` for a keyword."""

    @classmethod
    def named(cls, name: str, found: Sequence[Parameter]) -> Self | None:
        """Return the place of the parameter ``name``; ``None`` if there is no such parameter."""
        for position, each in enumerate(found):
            if each.name == name:
                return cls(name, position if each.kind in _POSITIONAL else None)
        return None

    @classmethod
    def first(cls, name: str, function: Callable[..., Any], found: Sequence[Parameter]) -> Self:
        """Return the place of the parameter ``name``, else of the first one after ``self``."""
        if (place := cls.named(name, found)) is not None:
            return place
        position = receiver_count(found)
        if position < len(found) and found[position].kind in _POSITIONAL:
            return cls(found[position].name, position)
        if position < len(found) and found[position].kind is Parameter.VAR_POSITIONAL:
            return cls(name, position)
        raise UsageError(
            f"{name_of(function)} must take {name} as its first argument,"
            f" as in def {getattr(function, '__name__', 'train')}({name}, ...)"
        )

    @property
    def order(self) -> tuple[bool, int]:
        """Sort key: positions from left to right, then keywords."""
        return self.position is None, self.position or 0


def without(function: Callable[..., Any], places: Sequence[ArgumentPlace]) -> inspect.Signature:
    """Return the signature of the decorated function, without the decorator's parameters."""
    ours = {place.name for place in places}
    whole = inspect.signature(function)
    return whole.replace(parameters=[p for p in whole.parameters.values() if p.name not in ours])


def inject(
    places: Sequence[ArgumentPlace], values: Sequence[object], arguments: Arguments
) -> Arguments:
    """Return the arguments with each value inserted at its place.

    Raises ``TypeError`` if the caller gave one of the values as a keyword.
    """
    args, kwargs = list(arguments[0]), dict(arguments[1])
    for place, value in sorted(zip(places, values, strict=True), key=lambda pair: pair[0].order):
        if place.position is None or place.position > len(args):
            if place.name in kwargs:
                raise TypeError(f"{place.name} is given by @resilient, not by the caller")
            kwargs[place.name] = value
        else:
            args.insert(place.position, value)
    return tuple(args), kwargs


def take_argument(place: ArgumentPlace, arguments: Arguments) -> tuple[Any, Arguments]:
    """Return the value at ``place``, and the arguments without it.

    Raises ``TypeError`` if the value is missing.
    """
    args, kwargs = arguments
    position = place.position
    if position is not None and position < len(args):
        return args[position], ((*args[:position], *args[position + 1 :]), kwargs)
    if place.name not in kwargs:
        raise TypeError(f"the batch is missing: the argument {place.name!r}")
    rest = {name: value for name, value in kwargs.items() if name != place.name}
    return kwargs[place.name], (args, rest)
