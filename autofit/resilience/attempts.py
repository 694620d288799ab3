"""The attempts of one call of a decorated function, until one succeeds. Imports torch."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from autofit.exceptions import CannotRetry, Refused
from autofit.resilience import out_of_memory, switches
from autofit.resilience.arguments import ArgumentPlace, Arguments, inject
from autofit.resilience.call_key import key_of
from autofit.resilience.checkpoint import Checkpoint, objects_of
from autofit.resilience.fallback import Fallback
from autofit.resilience.outer_models import OuterGradients
from autofit.resilience.ranks import (
    FAILED,
    FINISHED_PATIENCE,
    OUT_OF_MEMORY,
    PATIENCE,
    PEER_FAILED,
    SUCCEEDED,
    CallRanks,
    in_use,
)
from autofit.resilience.records import Hook, Retry, TriedSetting
from autofit.resilience.remembered import FittedSettings
from autofit.resilience.side_effects import OptimizerSteps
from autofit.worker.harness.torch_state.rng import RandomState
from autofit.worker.harness.torch_state.undo import NotTakenBack
from autofit.worker.oom.attempt import count_survived, free_frames
from autofit.worker.oom.classifier import Diagnosis, ErrorKind

log = logging.getLogger("autofit.resilient")

ANOTHER = Diagnosis(ErrorKind.OOM, "another rank", None, "another rank ran out of memory")


@dataclass(frozen=True, kw_only=True)
class ProtectedFunction:
    """A decorated function and the options of its decorator."""

    function: Callable[..., Any]
    name: str
    fallback: Fallback
    places: tuple[ArgumentPlace, ...]
    memory: FittedSettings | None
    """``None`` if every call starts with the first setting."""
    attempts: int
    """The maximum number of attempts in one call."""
    hooks: tuple[Hook, ...] = ()
    checkpoint: object = None

    def forget(self) -> None:
        """Start the next calls with the first setting again."""
        if self.memory is not None:
            self.memory.forget()

    def arguments_when_off(self, arguments: Arguments) -> Arguments:
        """Return the arguments of the function while the decorators are off."""
        return inject(self.places, self.fallback.when_off().values, arguments)


class ProtectedCall:
    """The attempts of one call of a decorated function."""

    def __init__(self, protected: ProtectedFunction, arguments: Arguments) -> None:
        self.protected = protected
        self.attempt = 0
        self._arguments = arguments
        self._key = key_of(arguments)
        self.ranks = CallRanks() if in_use() else None
        known = protected.memory.recall(self._key) if protected.memory else None
        known = known if self.ranks is None else self.ranks.agree_on_start(known)
        self.setting = protected.fallback.start(known)
        self._random = RandomState.now(elsewhere=False)
        self._gradients = OuterGradients(protected.function, arguments)
        self._checkpoint = self._make_checkpoint()
        self._failure: tuple[Exception, Diagnosis] | None = None
        self._shortage: tuple[Exception, str] | None = None
        """The last error of memory, whose frames are cleared, and the setting that it came from."""
        self._begin()

    def watched(self) -> AbstractContextManager[None]:
        """Return a context that frees this rank from a stuck collective when another rank fails.

        With one rank, the context does nothing.
        """
        return nullcontext() if self.ranks is None else self.ranks.watched()

    def _begin(self) -> None:
        self.attempt += 1
        self.steps = OptimizerSteps()
        self._watch = out_of_memory.AllocationWatch()
        self._started = time.perf_counter()

    def _make_checkpoint(self) -> Checkpoint | None:
        if self.protected.checkpoint is None:
            return None
        args, kwargs = self.arguments
        given = inspect.signature(self.protected.function).bind_partial(*args, **kwargs)
        return Checkpoint(objects_of(self.protected.checkpoint, given.arguments))

    @property
    def arguments(self) -> Arguments:
        """The arguments of the function in this attempt."""
        return inject(self.protected.places, self.setting.values, self._arguments)

    def can_retry(self, error: Exception) -> bool:
        """Return whether another attempt may follow ``error``; report the outcome to other ranks.

        True if memory ran out, a technique was refused, or another rank failed.
        """
        found = out_of_memory.diagnose(error, self._watch)
        how = OUT_OF_MEMORY if found.kind is ErrorKind.OOM else FAILED
        if isinstance(error, Refused) and self.protected.fallback.is_refused(self.setting):
            found, how = Diagnosis(ErrorKind.NOT_OOM, "refused", None, str(error)), OUT_OF_MEMORY
        elif self.ranks is not None and how is FAILED and self.ranks.is_peer_failure(error):
            found, how = ANOTHER, PEER_FAILED
        if self.ranks is not None:
            self.ranks.report(how)
        if how is FAILED:
            return False
        self._failure = (error, found)
        return True

    def succeeded(self) -> bool:
        """Remember the setting; return whether the call has ended on every rank."""
        if self.ranks is not None:
            self.ranks.report(SUCCEEDED)
            ended = self.ranks.outcomes(FINISHED_PATIENCE)
            if ended is not None and OUT_OF_MEMORY in ended:
                return False  # another rank ran out of memory: all ranks start over
        if self.protected.memory is not None:
            values = self.protected.fallback.to_remember(self.setting)
            self.protected.memory.remember(self._key, values, is_new=self.attempt > 1)
        return True

    def retry(self) -> None:
        """Prepare the next attempt, with a setting that needs less memory.

        Raises the error of the failed attempt, or ``CannotRetry``, if there is no next attempt.
        Call this outside any ``except`` block: inside, the interpreter holds the frames of the
        failed attempt, and with them its tensors.
        """
        failure, self._failure = self._failure, None
        error, found = failure or (None, ANOTHER)
        seconds = time.perf_counter() - self._started
        if error is not None:
            free_frames(error)
            if found.kind is ErrorKind.OOM:
                self._shortage = error, self.setting.label
            if not self._clean_up(error):
                raise error
        ended = () if self.ranks is None else self._leave_group(self.ranks, error)
        # Synchronizes with the device, so a stuck collective must be aborted first.
        out_of_memory.free_memory()
        setting = self._agree_on_next(error)
        del error, failure
        out_of_memory.free_memory()  # the traceback is gone only now
        tried, self.setting = self.setting, setting
        self._random.restore()
        record = self._record(tried, found, seconds)
        short = tuple(rank for rank, how in enumerate(ended) if how == OUT_OF_MEMORY)
        self._report(replace(record, ranks=short))
        self._begin()

    def _leave_group(self, ranks: CallRanks, error: Exception | None) -> list[str]:
        """Leave the process group; return the outcome of the attempt on each rank.

        Raises ``CannotRetry`` if a rank did not answer or failed with another error.
        """
        ranks.leave()
        ended = ranks.outcomes(PATIENCE)
        if ended is None or FAILED in ended:
            what = "did not answer" if ended is None else "failed with another error"
            raise CannotRetry(
                f"{self.protected.name} cannot start over: another rank {what}"
            ) from error
        if OUT_OF_MEMORY not in ended:
            raise error or CannotRetry(f"{self.protected.name} cannot start over: a rank is gone")
        return ended

    def _agree_on_next(self, error: Exception | None) -> TriedSetting:
        """Return the next setting, the same on every rank; raise if a rank cannot start over."""
        objection = self._objection()
        if self.ranks is None:
            if objection:
                raise CannotRetry(objection) from error
            assert error is not None
            return self._next_setting(error)
        limit = self.protected.attempts
        setting = self.protected.fallback.leaner(self.setting) if self.attempt < limit else None
        values = None if setting is None else self.protected.fallback.to_remember(setting)
        try:
            objection, values = self.ranks.agree(objection, values)
        except TimeoutError:
            objection = f"{self.protected.name} cannot start over: another rank did not answer"
        if objection:
            raise CannotRetry(objection) from error
        if values is None:
            raise error or CannotRetry(
                f"{self.protected.name}: another rank has no attempt left that needs less memory"
            )
        self.ranks.join_again()
        if setting is not None and self.ranks.first:
            return setting
        return self.protected.fallback.start(values)

    def _objection(self) -> str:
        """Undo what the failed attempt changed outside the function.

        Returns the reason if this is not possible, else an empty string.
        """
        stepped = self.steps.changed()
        clean = self._gradients.undo()
        if self._checkpoint is not None:
            self._checkpoint.restore()
        elif stepped is not None:
            return (
                f"{self.protected.name} ran out of memory after {stepped} had changed parameters"
                " made outside it: starting over would train twice on the same data; make the"
                " model inside the function, decorate the step alone (@autofit.resilient.step),"
                " or give checkpoint="
            )
        elif not clean:
            return (
                f"{self.protected.name} ran out of memory after its backward had added to"
                " gradients that were there before: starting over would count them twice; call it"
                " with empty gradients, or give checkpoint="
            )
        return ""

    @contextmanager
    def cleaned_up(self) -> Iterator[None]:
        """Remove the attempt's plan after the context, unless ``retry`` will."""
        try:
            yield
        except BaseException as error:
            self._clean_up(error)
            raise
        if self._failure is None:
            self.protected.fallback.clean_up(self.setting)

    def _clean_up(self, error: BaseException) -> bool:
        """Remove the attempt's plan after ``error``; return whether memory sufficed for that."""
        try:
            self.protected.fallback.clean_up(self.setting)
        except NotTakenBack:
            error.add_note("autofit: memory ran out again while the plan was taken back")
            return False
        return True

    def _next_setting(self, error: Exception) -> TriedSetting:
        setting = self.protected.fallback.leaner(self.setting)
        if setting is not None and self.attempt < self.protected.attempts:
            return setting
        why = "nothing leaner is left"
        if setting is not None:
            why = f"{self.attempt} attempts are the limit"
        error, label = self._shortage or (error, self.setting.label)  # a refusal is not the cause
        error.add_note(f"autofit: {self.protected.name} ran out of memory at {label}; {why}")
        raise error

    def _record(self, tried: TriedSetting, found: Diagnosis, seconds: float) -> Retry:
        return Retry(
            function=self.protected.name,
            attempt=self.attempt,
            tried=tried.label,
            next=self.setting.label,
            message=found.message,
            requested=found.requested,
            seconds=seconds,
            memory=out_of_memory.tensor_bytes(),
            warning=self.setting.warning,
            refused=found.kind is not ErrorKind.OOM,
        )

    def _report(self, record: Retry) -> None:
        log.warning("%s", line(record))
        if not record.refused:
            count_survived()
        for hook in (*switches.hooks(), *self.protected.hooks):
            hook(record)


def line(record: Retry) -> str:
    """Return the log message for a retry."""
    warning = f"; {record.warning}" if record.warning else ""
    tried = f"{record.tried} (attempt {record.attempt})"
    what = f"{tried} cannot be used: {record.message}"
    happened = what if record.refused else f"out of memory at {tried}"
    return f"{record.function}: {happened}; tries {record.next}{warning}"


def run(protected: ProtectedFunction, arguments: Arguments) -> Any:
    """Call the function until an attempt succeeds; return its result."""
    if not switches.active():
        args, kwargs = protected.arguments_when_off(arguments)
        return protected.function(*args, **kwargs)
    call = ProtectedCall(protected, arguments)
    while True:
        with call.cleaned_up():
            try:
                with call.steps, call.watched():
                    result = switches.attempt(protected.function, *call.arguments)
            except Exception as error:
                if not call.can_retry(error):
                    raise
            else:
                if call.succeeded():
                    return result
                del result
        call.retry()
