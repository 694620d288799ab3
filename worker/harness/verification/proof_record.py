"""What the checks of one root have found, for later plans and for later processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autofit.plan import Plan
from autofit.worker.harness.verification.proof_cache import Known

PLAN = "what of a plan shows in the gradients"
"""Names this evidence in the store: changing the text makes older stores' evidence unknown."""


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What rounding weights and inputs to bf16 does to a root's plain call."""

    gradients: float
    """Relative difference of all gradients together."""
    buffers: frozenset[str]
    """Names of the buffers that then change differently."""


class ProofRecord:
    """The findings of one root's checks. Only its own methods change it."""

    def __init__(self, evidence: Known | None = None) -> None:
        """``evidence``: what this process or an earlier one verified of the root."""
        self.evidence = evidence or Known()
        self.proofs = 0
        """Checks made so far. A step that contains a check needs extra time and memory."""
        self.difference: float | None = None
        """Relative difference of the gradients in the latest check."""
        self.sensitivity: Sensitivity | None = None
        """``None`` until a check has measured it."""
        self.noise_measured_here = False
        """This process has checked a plan that rounds, so the noise is that of its own weights."""
        self.autocasts = False
        """The root's own forward enters autocast."""
        self._plain_results: dict[tuple[object, ...], Any] = {}

    def proof_begins(self) -> None:
        """Count a check, so that the step under way is left out of the measurement."""
        self.proofs += 1

    def check_begins(self) -> None:
        """Forget the difference that the check before has found."""
        self.difference = None

    def found_difference(self, difference: float | None) -> None:
        """Keep the relative difference of the gradients."""
        self.difference = difference

    def measure_noise_anew(self) -> None:
        """Drop a sensitivity that was found with other weights: it may be too small for these."""
        self.noise_measured_here, self.sensitivity = True, None

    def found_sensitivity(self, sensitivity: Sensitivity | None) -> None:
        """Keep what rounding does to the root."""
        self.sensitivity = sensitivity

    def found_autocast(self, entered: bool) -> None:
        """Note whether a forward of the root entered autocast; one that did is enough."""
        self.autocasts = self.autocasts or entered

    def plain_result(self, key: tuple[object, ...]) -> Any | None:
        """Return what the samples named by ``key`` gave without a plan in this call, if known."""
        return self._plain_results.get(key)

    def keep_plain_result(self, key: tuple[object, ...], result: Any) -> None:
        """Keep a plain result: several plans may be checked within one call."""
        self._plain_results[key] = result

    def plain_results(self) -> tuple[tuple[object, ...], ...]:
        """Return the keys of the plain results that are kept."""
        return tuple(self._plain_results)

    def drop_plain_results(self) -> None:
        """Free the plain results: the call ended, or the model has changed."""
        self._plain_results.clear()

    def remember(self, plan: Plan) -> None:
        """Record that ``plan`` passed its check, with what the check has found."""
        noise = self.sensitivity
        held = noise and [noise.gradients, sorted(noise.buffers)]
        self.evidence.put([self.autocasts, held], PLAN, plan.in_calls.changes)

    def is_known(self, plan: Plan) -> bool:
        """Return whether ``plan`` passed its check before; take over what that check found.

        Blocks run again one by one. If all of them passed, any number of them does.
        """
        plans = (plan, plan.all_blocks)
        found = next(
            filter(None, (self.evidence.get(PLAN, p.in_calls.changes) for p in plans)), None
        )
        if found is None:
            return False
        autocasts, noise = found
        self.found_autocast(autocasts)
        if noise is not None and self.sensitivity is None:
            self.sensitivity = Sensitivity(noise[0], frozenset(noise[1]))
        return True
