"""One call of a decorated function, from its first attempt to the one that holds. Imports torch."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from autofit.exceptions import CannotRetry, Refused
from autofit.resilience import out_of_memory, switches
from autofit.resilience.arguments import Arguments, Place, inject
from autofit.resilience.call_key import key_of
from autofit.resilience.checkpoint import Checkpoint, named
from autofit.resilience.fallback import Fallback
from autofit.resilience.outer_models import Gradients
from autofit.resilience.ranks import (
    BROKEN,
    FINISHED_PATIENCE,
    HELD,
    LOST,
    PATIENCE,
    SHORT,
    Ranks,
    in_use,
)
from autofit.resilience.records import Hook, Retry, Setting
from autofit.resilience.remembered import Memory
from autofit.resilience.side_effects import Steps
from autofit.worker.harness.torch_state.rng import RandomState
from autofit.worker.oom.classifier import Diagnosis, Kind

log = logging.getLogger("autofit.resilient")

ANOTHER = Diagnosis(Kind.OOM, "another rank", None, "another rank ran out of memory")


@dataclass(frozen=True, kw_only=True)
class Protected:
    """A decorated function and how it is protected."""

    function: Callable[..., Any]
    name: str
    fallback: Fallback
    places: tuple[Place, ...]
    memory: Memory | None
    """``None`` when every call shall start where it was asked to."""
    attempts: int
    """Most attempts in a call."""
    hooks: tuple[Hook, ...] = ()
    checkpoint: object = None

    def forget(self) -> None:
        """Start every call where it was asked to."""
        if self.memory is not None:
            self.memory.forget()

    def unprotected(self, arguments: Arguments) -> Arguments:
        """Return what the function is given while the decorators are off."""
        return inject(self.places, self.fallback.off().values, arguments)


class Call:
    """The attempts of one call."""

    def __init__(self, protected: Protected, arguments: Arguments) -> None:
        self.of = protected
        self.attempt = 0
        self._arguments = arguments
        self._key = key_of(arguments)
        self.ranks = Ranks() if in_use() else None
        self.setting = protected.fallback.start(self._remembered())
        self._random = RandomState.now(elsewhere=False)
        self._gradients = Gradients(protected.function, arguments)
        self._checkpoint = self._taken()
        self._failure: tuple[Exception, Diagnosis] | None = None
        self._begin()

    def _remembered(self) -> Mapping[str, int | str] | None:
        memory = self.of.memory
        known = memory.recall(self._key) if memory else None
        return known if self.ranks is None else self.ranks.same_start(known)

    def watched(self) -> AbstractContextManager[None]:
        """Return what frees this rank while others fail; nothing where it is alone."""
        return nullcontext() if self.ranks is None else self.ranks.watched()

    def _begin(self) -> None:
        self.attempt += 1
        self.steps = Steps()
        self._witness = out_of_memory.Witness()
        self._started = time.perf_counter()

    def _taken(self) -> Checkpoint | None:
        if self.of.checkpoint is None:
            return None
        args, kwargs = self.arguments
        given = inspect.signature(self.of.function).bind_partial(*args, **kwargs)
        return Checkpoint(named(self.of.checkpoint, given.arguments))

    @property
    def arguments(self) -> Arguments:
        """What the function is given in this attempt."""
        return inject(self.of.places, self.setting.values, self._arguments)

    def ran_out(self, error: Exception) -> bool:
        """Return whether memory ran out, or a technique is refused; all else is not ours."""
        found = out_of_memory.diagnose(error, self._witness)
        how = SHORT if found.kind is Kind.OOM else BROKEN
        if isinstance(error, Refused) and self.of.fallback.refused(self.setting):
            found, how = Diagnosis(Kind.NOT_OOM, "refused", None, str(error)), SHORT
        elif self.ranks is not None and how is BROKEN and self.ranks.lost(error):
            found, how = ANOTHER, LOST
        if self.ranks is not None:
            self.ranks.say(how)
        if how is BROKEN:
            return False
        self._failure = (error, found)
        return True

    def held(self) -> bool:
        """Remember the setting; return whether the call is over, on every rank."""
        if self.ranks is not None:
            self.ranks.say(HELD)
            ended = self.ranks.heard(FINISHED_PATIENCE)
            if ended is not None and SHORT in ended:
                return False  # others start over, and need this rank
        if self.of.memory is not None:
            kept = self.of.fallback.to_remember(self.setting)
            self.of.memory.remember(self._key, kept, news=self.attempt > 1)
        return True

    def retry(self) -> None:
        """Get ready for the next attempt, one setting leaner; raise where there can be none.

        Outside any ``except``, so that nothing holds what the failed attempt has made.
        """
        failure, self._failure = self._failure, None
        error, found = failure or (None, ANOTHER)
        seconds = time.perf_counter() - self._started
        if error is not None:
            out_of_memory.forget(error)
        ended = () if self.ranks is None else self._left(self.ranks, error)
        out_of_memory.give_back()  # waits for the device: not before a stuck collective is aborted
        setting = self._agreed(error)
        del error, failure
        out_of_memory.give_back()  # what the traceback held
        tried, self.setting = self.setting, setting
        self._random.restore()
        record = self._record(tried, found, seconds)
        short = tuple(rank for rank, how in enumerate(ended) if how == SHORT)
        self._tell(replace(record, ranks=short))
        self._begin()

    def _left(self, ranks: Ranks, error: Exception | None) -> list[str]:
        """Leave the process group; return how the attempt ended on each rank, if it can go on."""
        if error is not None:
            out_of_memory.shorten(error)  # connections close with the last that holds the group
        ranks.leave()
        ended = ranks.heard(PATIENCE)
        if ended is None or BROKEN in ended:
            what = "did not answer" if ended is None else "failed of something else"
            raise CannotRetry(f"{self.of.name} cannot start over: another rank {what}") from error
        if SHORT not in ended:
            raise error or CannotRetry(f"{self.of.name} cannot start over: a rank is gone")
        return ended

    def _agreed(self, error: Exception | None) -> Setting:
        """Return the next setting, the same on every rank; raise where one cannot start over."""
        objection = self._objection(error)
        if self.ranks is None:
            if objection:
                raise CannotRetry(objection) from error
            assert error is not None
            return self._next(error)
        setting = self.of.fallback.leaner(self.setting) if self.attempt < self.of.attempts else None
        kept = None if setting is None else self.of.fallback.to_remember(setting)
        try:
            objection, kept = self.ranks.agree(objection, kept)
        except TimeoutError:
            objection = f"{self.of.name} cannot start over: another rank did not answer"
        if objection:
            raise CannotRetry(objection) from error
        if kept is None:
            raise error or CannotRetry(f"{self.of.name}: nothing leaner is left on another rank")
        self.ranks.join_again()
        return setting if setting is not None and self.ranks.first else self.of.fallback.start(kept)

    def _objection(self, error: Exception | None) -> str:
        """Undo what the attempt did outside the function; say why, where that cannot be done."""
        stepped = self.steps.changed()
        if stepped is not None and error is not None:
            out_of_memory.shorten(error)
            stepped = self.steps.changed()
        clean = self._gradients.take_back()
        if self._checkpoint is not None:
            self._checkpoint.restore()
        elif stepped is not None:
            return (
                f"{self.of.name} ran out of memory after {stepped} had changed parameters made"
                " outside it: starting over would train twice on the same data; make the model"
                " inside the function, decorate the step alone (@autofit.resilient.step), or give"
                " checkpoint="
            )
        elif not clean:
            return (
                f"{self.of.name} ran out of memory after its backward had added to gradients that"
                " were there before: starting over would count them twice; call it with empty"
                " gradients, or give checkpoint="
            )
        return ""

    def _next(self, error: Exception) -> Setting:
        setting = self.of.fallback.leaner(self.setting)
        if setting is not None and self.attempt < self.of.attempts:
            return setting
        why = (
            "nothing leaner is left"
            if setting is None
            else f"{self.attempt} attempts are the limit"
        )
        error.add_note(f"autofit: {self.of.name} ran out of memory at {self.setting.label}; {why}")
        raise error

    def _record(self, tried: Setting, found: Diagnosis, seconds: float) -> Retry:
        return Retry(
            function=self.of.name,
            attempt=self.attempt,
            tried=tried.label,
            next=self.setting.label,
            message=found.message,
            requested=found.requested,
            seconds=seconds,
            memory=out_of_memory.held(),
            warning=self.setting.warning,
            refused=found.kind is not Kind.OOM,
        )

    def _tell(self, record: Retry) -> None:
        log.warning("%s", line(record))
        for hook in (*switches.hooks(), *self.of.hooks):
            hook(record)


def line(record: Retry) -> str:
    """Return what is logged of a retry."""
    warning = f"; {record.warning}" if record.warning else ""
    what = f"{record.message}:" if record.refused else "out of memory at"
    return (
        f"{record.function}: {what} {record.tried} (attempt {record.attempt});"
        f" tries {record.next}{warning}"
    )


# --- wrappers ---------------------------------------------------------------------------------


def run(protected: Protected, arguments: Arguments) -> Any:
    """Call the function until it holds."""
    if not switches.active():
        args, kwargs = protected.unprotected(arguments)
        return protected.function(*args, **kwargs)
    call = Call(protected, arguments)
    while True:
        try:
            with call.steps, call.watched():
                result = _attempt(protected.function, *call.arguments)
        except Exception as error:
            if not call.ran_out(error):
                raise
        else:
            if call.held():
                return result
            del result
        finally:
            protected.fallback.finished(call.setting)
        call.retry()


async def run_async(protected: Protected, arguments: Arguments) -> Any:
    """Await the function until it holds."""
    if not switches.active():
        args, kwargs = protected.unprotected(arguments)
        return await protected.function(*args, **kwargs)
    call = Call(protected, arguments)
    while True:
        try:
            with call.steps, call.watched():
                result = await _attempt_async(protected.function, *call.arguments)
        except Exception as error:
            if not call.ran_out(error):
                raise
        else:
            if call.held():
                return result
            del result
        finally:
            protected.fallback.finished(call.setting)
        call.retry()


def _attempt(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    attempted = switches.Attempted()
    result = function(*args, **kwargs)
    attempted.done()
    return result


async def _attempt_async(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    attempted = switches.Attempted()
    result = await function(*args, **kwargs)
    attempted.done()
    return result
