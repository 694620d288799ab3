"""The ways in which a check runs samples, each of which needs less memory than those before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import nn

from autofit.worker.harness.torch_state.host_saved import saved_on_host
from autofit.worker.oom.attempt import AttemptOutcome

T = TypeVar("T")

SAMPLES = 4
"""The number of samples in a check: enough for uneven chunks, few enough to be cheap."""

LowMemory = Callable[[], AbstractContextManager[object]]
"""Returns a context in which the model saves fewer activations, or smaller ones."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to run samples of a call."""

    samples: int = SAMPLES
    """The largest number of samples."""
    wide: bool = False
    """In float64; otherwise in the model's own precision."""
    around: LowMemory = nullcontext
    on_host: bool = False
    """Autograd's saved tensors go to host memory, which is slow."""
    autocast: bool = False
    """In the script's autocast. In half precision, rounding may differ as much as a wrong split
    does."""

    def saving(self, module: nn.Module) -> AbstractContextManager[object]:
        """Return the context in which ``module`` saves what this way says."""
        return saved_on_host(module.parameters()) if self.on_host else self.around()


def first_that_runs(
    ways: Iterable[Way], run: Callable[[Way], AttemptOutcome[T]]
) -> AttemptOutcome[T]:
    """Return the outcome of the first way that fits and that the model supports, else of the last.

    In the same precision, a model that fails on some samples is not run on fewer. One that does not
    fit is not run on as many or more in the same way.
    """
    outcome: AttemptOutcome[T] = AttemptOutcome()
    failed: dict[tuple[bool, bool], int] = {}
    short: dict[Way, int] = {}
    try:
        for way in ways:
            precision, same = (way.wide, way.autocast), replace(way, samples=0)
            fewer = way.samples <= failed.get(precision, -1)
            if fewer or way.samples >= short.get(same, way.samples + 1):
                continue
            outcome = run(way)
            if outcome.failure is not None:
                failed[precision] = way.samples
            elif outcome.fits:
                break
            else:
                short[same] = way.samples
        return outcome
    finally:
        del outcome  # its error holds this frame, and they would keep each other
