"""The decorator as people use it: its forms, its switches and their types. Imports no torch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from autofit.exceptions import UsageError
from autofit.resilience import switches
from autofit.resilience.ladder import BatchSizes, Ladder, Reduce
from autofit.resilience.records import Hook
from autofit.resilience.signature import Place, name_of, parameters, without

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")

ATTEMPTS = 20
"""Most attempts in one call, unless told otherwise."""


class Accumulating(Protocol[P, R_co]):
    """A function that takes the batch size and how many of them make an optimizer step."""

    def __call__(
        self, batch_size: int, accumulation: int, *args: P.args, **kwargs: P.kwargs
    ) -> R_co:
        """Train."""


class TakesBatchSize(Protocol):
    """Decorates a function, or a method, whose first argument is the batch size."""

    @overload
    def __call__(self, function: Accumulating[P, R], /) -> Callable[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[int, P], R], /) -> Callable[P, R]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[S, int, P], R], /
    ) -> Callable[Concatenate[S, P], R]: ...


class Resilient:
    """``autofit.resilient``: runs a function again, leaner, when memory runs out in it.

    Only what ``autofit.worker.oom`` calls out of memory is answered; every other exception passes
    through untouched. Before the next attempt the failed one's frames are cleared and its memory is
    given back, outside the ``except`` block. See ``docs/resilient.md``.
    """

    def __call__(
        self,
        *,
        batch_size: int,
        smallest: int = 1,
        reduce: Reduce | None = None,
        attempts: int = ATTEMPTS,
        on_retry: Hook | Iterable[Hook] = (),
        checkpoint: object = None,
        remember: bool = True,
    ) -> TakesBatchSize:
        """Give the function a batch size that fits, from ``batch_size`` down to ``smallest``.

        A function that also takes ``accumulation`` is given as many batches as keep the effective
        batch. ``reduce``: from a size that does not fit, the next. ``checkpoint``: what to put back
        before another attempt, objects with ``state_dict`` or names of arguments. ``remember``:
        a call like one before starts at what held then.
        """

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            found = parameters(function)
            places = [Place.first("batch_size", function, found)]
            accumulation = Place.named("accumulation", found)
            if accumulation is not None:
                places.append(accumulation)
            ladder = BatchSizes(
                batch_size, smallest=smallest, reduce=reduce, accumulates=len(places) == 2
            )
            return _wrapped(
                function,
                ladder,
                places,
                attempts=attempts,
                on_retry=on_retry,
                checkpoint=checkpoint,
                remember=remember,
            )

        return decorate

    active = staticmethod(switches.active)
    set_active = staticmethod(switches.set_active)
    set_hooks = staticmethod(switches.set_hooks)

    def inject(self, *at: int, after: bool = False) -> AbstractContextManager[None]:
        """Let decorated functions run out of memory at the ``at``-th attempts made in a block.

        For tests of what a training does then. ``after``: when the function has done its work.
        """
        return switches.inject(*at, after=after)

    def forget(self, function: Callable[..., Any]) -> None:
        """Let calls of a decorated function start where they were asked to again."""
        protection = getattr(function, _ATTRIBUTE, None)
        if protection is None:
            raise UsageError(f"{name_of(function)} is not decorated with @resilient")
        if (memory := protection().memory) is not None:
            memory.forget()


_ATTRIBUTE = "__autofit_resilient__"


def _wrapped(
    function: Callable[..., Any],
    ladder: Ladder,
    places: list[Place],
    *,
    attempts: int,
    on_retry: Hook | Iterable[Hook],
    checkpoint: object,
    remember: bool,
) -> Callable[..., Any]:
    """Return ``function`` protected; torch is imported when it is first called."""
    if attempts < 1:
        raise UsageError(f"attempts={attempts}: give at least 1")
    hooks = (on_retry,) if callable(on_retry) else tuple(on_retry)

    @functools.cache
    def protection() -> Any:
        from autofit.resilience.call import Protected
        from autofit.resilience.memory import Memory

        name = name_of(function)
        return Protected(
            function=function,
            name=name,
            ladder=ladder,
            places=tuple(places),
            memory=Memory(name) if remember else None,
            attempts=attempts,
            hooks=hooks,
            checkpoint=checkpoint,
        )

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            from autofit.resilience.call import run_async

            return await run_async(protection(), (args, kwargs))

    else:

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            from autofit.resilience.call import run

            return run(protection(), (args, kwargs))

    setattr(wrapper, _ATTRIBUTE, protection)
    wrapper.__signature__ = without(function, places)  # type: ignore[attr-defined]
    return wrapper


resilient = Resilient()
"""The one instance: ``autofit.resilient``."""
