"""``autofit.resilient``: the forms of the decorator, its switches, and types. Imports no torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from autofit.exceptions import UsageError
from autofit.plan import Plan
from autofit.resilience import switches
from autofit.resilience.active_plan import ActivePlan, check_given
from autofit.resilience.arguments import ArgumentPlace, name_of, parameters, without
from autofit.resilience.fallback import BatchSizes, Fallback, Reduce
from autofit.resilience.records import Hook
from autofit.strategies import Fidelity

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")

ATTEMPTS = 20
"""Default of the maximum number of attempts in one call."""


class AccumulatingFunction(Protocol[P, R_co]):
    """A function that takes the batch size and the number of batches in an optimizer step."""

    def __call__(
        self, batch_size: int, accumulation: int, *args: P.args, **kwargs: P.kwargs
    ) -> R_co:
        """Train."""


class BatchSizeDecorator(Protocol):
    """Decorates a function, or a method, whose first argument is the batch size."""

    @overload
    def __call__(self, function: AccumulatingFunction[P, R], /) -> Callable[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[int, P], R], /) -> Callable[P, R]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[S, int, P], R], /
    ) -> Callable[Concatenate[S, P], R]: ...


class PlanDecorator(Protocol):
    """Decorates a function, or a method, whose first argument is the plan."""

    @overload
    def __call__(self, function: Callable[Concatenate[ActivePlan, P], R], /) -> Callable[P, R]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[S, ActivePlan, P], R], /
    ) -> Callable[Concatenate[S, P], R]: ...


class StepDecorator(Protocol):
    """Decorates a function without changing its type."""

    def __call__(self, function: Callable[P, R], /) -> Callable[P, R]:
        """Decorate ``function``."""


class Resilient:
    """``autofit.resilient``: calls a function again with less memory when memory runs out in it.

    Only errors that ``autofit.worker.oom`` classifies as out of memory are handled. Every other
    exception passes through. Before the next attempt, outside the ``except`` block, the frames of
    the failed attempt are cleared and its memory is freed.

    A plan is verified in the user's process: a few samples run through the model before its first
    step. Afterwards the state that calls of the model can reach is restored: buffers, attributes,
    values of hooks, globals of the user's code, and random generators. A technique that would leave
    another state than plain Python is not used, and ``Retry.refused`` reports it.

    >>> @Resilient()(batch_size=64, remember=False)
    ... def train(batch_size: int) -> str:
    ...     if batch_size > 16:
    ...         raise MemoryError
    ...     return f"trained with {batch_size}"
    >>> train()
    'trained with 16'
    """

    @overload
    def __call__(self, function: Callable[Concatenate[ActivePlan, P], R], /) -> Callable[P, R]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[S, ActivePlan, P], R], /
    ) -> Callable[Concatenate[S, P], R]: ...
    @overload
    def __call__(
        self,
        *,
        plan: Plan | Mapping[str, str] | None = None,
        allow: str = "redraw",
        effective_batch: int | None = None,
        storage: str | None = None,
        attempts: int = ATTEMPTS,
        on_retry: Hook | Iterable[Hook] = (),
        checkpoint: object = None,
        remember: bool = True,
    ) -> PlanDecorator: ...
    @overload
    def __call__(
        self,
        *,
        batch_size: int,
        smallest: int = 1,
        reduce: Reduce | None = None,
        storage: str | None = None,
        attempts: int = ATTEMPTS,
        on_retry: Hook | Iterable[Hook] = (),
        checkpoint: object = None,
        remember: bool = True,
    ) -> BatchSizeDecorator: ...
    def __call__(
        self,
        function: Any = None,
        *,
        batch_size: int | None = None,
        smallest: int = 1,
        reduce: Reduce | None = None,
        plan: Plan | Mapping[str, str] | None = None,
        allow: str = "redraw",
        effective_batch: int | None = None,
        storage: str | None = None,
        attempts: int = ATTEMPTS,
        on_retry: Hook | Iterable[Hook] = (),
        checkpoint: object = None,
        remember: bool = True,
    ) -> Any:
        """Decorate a function that takes a plan or, with ``batch_size``, a batch size.

        *Batch size*: attempts go from ``batch_size`` down to ``smallest``. ``reduce`` returns the
        next size after one that does not fit. A function with a parameter ``accumulation`` receives
        the number of batches that keeps the effective batch.

        *Plan*: attempts start with ``plan`` (levels by technique), or with the best stored plan of
        the running script, which may compute in lower precision. They continue with plans that need
        less memory. A retry lowers no precision further, unless ``allow`` is ``"rounding"``; with
        ``"exact"``, dropout draws the same masks too.
        ``effective_batch`` is the samples in an optimizer step, for loops that cut their own
        batches.

        *Both*: ``storage`` is where results are kept, by default ``$AUTOFIT_STORAGE``. ``attempts``
        limits the attempts of one call. ``on_retry`` are hooks that receive each retry.
        ``checkpoint`` names what is restored before another attempt: objects with ``state_dict``,
        or names of arguments. With ``remember``, a similar call starts with the setting that held
        before.
        """
        options = Options(
            attempts=attempts,
            on_retry=on_retry,
            checkpoint=checkpoint,
            remember=remember,
            storage=storage,
        )
        if batch_size is not None:
            if plan is not None or effective_batch is not None:
                raise UsageError(
                    "give batch_size or plan, not both: a plan splits the batch itself"
                )
            return functools.partial(_with_batch_size, options, batch_size, smallest, reduce)
        decorate = functools.partial(_with_plan, options, plan, allow, effective_batch)
        return decorate if function is None else decorate(function)

    @overload
    def step(self, function: Callable[P, R], /) -> Callable[P, R]: ...
    @overload
    def step(
        self,
        *,
        dim: int = 0,
        reduction: str | Callable[[Any], float] = "mean",
        backward: Callable[[Any], object] | None = None,
        join: Callable[[list[Any]], Any] | None = None,
        smallest: int = 1,
        grow: bool = True,
        mixes_samples: bool = False,
        storage: str | None = None,
        on_retry: Hook | Iterable[Hook] = (),
        remember: bool = True,
    ) -> StepDecorator: ...
    def step(
        self,
        function: Any = None,
        *,
        dim: int = 0,
        reduction: str | Callable[[Any], float] = "mean",
        backward: Callable[[Any], object] | None = None,
        join: Callable[[list[Any]], Any] | None = None,
        smallest: int = 1,
        grow: bool = True,
        mixes_samples: bool = False,
        storage: str | None = None,
        on_retry: Hook | Iterable[Hook] = (),
        remember: bool = True,
    ) -> Any:
        """Decorate a function that takes a batch and returns its loss; backward runs here.

        When memory runs out, the batch is cut along ``dim``. The gradients of the parts add up to
        those of the whole batch.

        ``reduction`` says what the loss is where that cannot be verified: a ``"mean"`` over
        samples, a ``"sum"``, or a mean over the count that a function of the batch returns, such as
        its tokens. ``backward`` replaces
        ``torch.autograd.backward``, for example by ``accelerator.backward``. ``join`` joins the
        outputs of the parts; without it the rules in ``docs/how-to/split-a-step.md`` apply. With
        ``grow``, twice as many samples are tried after 100 successful steps. ``mixes_samples``
        allows splitting under BatchNorm.

        Before a batch is first split, the function runs on a few samples, to verify that the losses
        of parts add up; ``CannotRetry`` is raised if they do not. A function that counts or stores
        something does so once for each part and each failed attempt.
        """
        options = Options(
            attempts=1, on_retry=on_retry, checkpoint=None, remember=remember, storage=storage
        )
        if not callable(reduction) and reduction not in ("mean", "sum"):
            raise UsageError(f"reduction={reduction!r}: give mean, sum, or a function of the batch")

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            place = ArgumentPlace.first("batch", function, parameters(function))

            def make() -> Any:
                from autofit.resilience.step import SplitStep

                return SplitStep(
                    function=function,
                    name=name_of(function),
                    place=place,
                    dim=dim,
                    reduction=reduction,
                    backward=backward,
                    join=join,
                    smallest=smallest,
                    grows=grow,
                    mixes_samples=mixes_samples,
                    hooks=options.hooks,
                    memory=_memory(name_of(function), options),
                )

            return _wrapped(function, functools.cache(make), "autofit.resilience.step")

        return decorate if function is None else decorate(function)

    active = staticmethod(switches.active)
    set_active = staticmethod(switches.set_active)
    set_hooks = staticmethod(switches.set_hooks)

    def inject(self, *at: int, after: bool = False) -> AbstractContextManager[None]:
        """Raise an out-of-memory error in the ``at``-th attempts made inside a ``with`` block.

        For tests of a training. With ``after``, the error is raised when the function returns.
        """
        return switches.inject(*at, after=after)

    def forget(self, function: Callable[..., Any]) -> None:
        """Forget which settings fitted: the next call of ``function`` tries the first one."""
        protection = getattr(function, _ATTRIBUTE, None)
        if protection is None:
            raise UsageError(f"{name_of(function)} is not decorated with @resilient")
        protection().forget()


_ATTRIBUTE = "__autofit_resilient__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options that the decorators share."""

    attempts: int
    on_retry: Hook | Iterable[Hook]
    checkpoint: object
    remember: bool
    storage: str | None

    def __post_init__(self) -> None:
        """Raise ``UsageError`` for an invalid option."""
        if self.attempts < 1:
            raise UsageError(f"attempts={self.attempts}: give at least 1")

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """The hooks of the decorated function, as a tuple."""
        return (self.on_retry,) if callable(self.on_retry) else tuple(self.on_retry)


def _with_batch_size(
    options: Options,
    batch_size: int,
    smallest: int,
    reduce: Reduce | None,
    function: Callable[..., Any],
) -> Callable[..., Any]:
    found = parameters(function)
    places = [ArgumentPlace.first("batch_size", function, found)]
    accumulation = ArgumentPlace.named("accumulation", found)
    if accumulation is not None:
        places.append(accumulation)
    fallback = BatchSizes(
        batch_size, smallest=smallest, reduce=reduce, accumulates=len(places) == 2
    )
    return _protected(function, lambda: fallback, places, options)


def _with_plan(
    options: Options,
    plan: Plan | Mapping[str, str] | None,
    allow: str,
    effective_batch: int | None,
    function: Callable[..., Any],
) -> Callable[..., Any]:
    given = Plan.of(plan) if isinstance(plan, Mapping) else plan
    fidelity = next((each for each in Fidelity if str(each) == allow), None)
    if fidelity is None:
        names = ", ".join(str(each) for each in Fidelity)
        raise UsageError(f"allow={allow!r}: give one of {names}")
    check_given(given)

    def fallback() -> Fallback:
        from autofit.resilience.plan_fallback import Plans

        return Plans(
            given, storage=options.storage, allow=fidelity, effective_batch=effective_batch
        )

    place = ArgumentPlace.first("plan", function, parameters(function))
    return _protected(function, fallback, [place], options)


def _protected(
    function: Callable[..., Any],
    make_fallback: Callable[[], Fallback],
    places: list[ArgumentPlace],
    options: Options,
) -> Callable[..., Any]:
    """Return the decorated ``function``; its first call imports torch."""

    @functools.cache
    def protection() -> Any:
        from autofit.resilience.attempts import ProtectedFunction

        name = name_of(function)
        return ProtectedFunction(
            function=function,
            name=name,
            fallback=make_fallback(),
            places=tuple(places),
            memory=_memory(name, options),
            attempts=options.attempts,
            hooks=options.hooks,
            checkpoint=options.checkpoint,
        )

    wrapper = _wrapped(function, protection, "autofit.resilience.attempts")
    wrapper.__signature__ = without(function, places)  # type: ignore[attr-defined]
    return wrapper


def _memory(name: str, options: Options) -> Any:
    from autofit.resilience.remembered import FittedSettings

    return FittedSettings(name, options.storage) if options.remember else None


def _wrapped(
    function: Callable[..., Any], protection: Callable[[], Any], home: str
) -> Callable[..., Any]:
    """Return a wrapper that passes calls to ``run`` of the module ``home``.

    The first call imports the module, and with it torch.
    """
    run: Any = None

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal run
        run = run or import_module(home).run
        return run(protection(), (args, kwargs))

    setattr(wrapper, _ATTRIBUTE, protection)
    return wrapper


resilient = Resilient()
"""The instance that is exported as ``autofit.resilient``."""
