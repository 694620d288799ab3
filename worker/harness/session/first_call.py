"""What the first call of a root tells: its samples, and how it is split."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autofit.exceptions import Refused
from autofit.facts import RootFacts
from autofit.worker.harness.batch.layout import Batch, Layout
from autofit.worker.harness.session import script_facts
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.harness.torch_state.guarded import beside
from autofit.worker.harness.torch_state.hf_cache import without_cache
from autofit.worker.harness.verification.split_check import batched_arguments
from autofit.worker.meter import Meter
from autofit.worker.oom.attempt import Outcome, attempt

BATCH = "which dimension the batch is"
"""Names this evidence in the store: changing the text makes older stores' evidence unknown."""


def with_samples(
    root: HarnessRoot, facts: RootFacts, args: Any, kwargs: Any, meter: Meter
) -> RootFacts:
    """Return ``facts`` with the samples of a root's first call.

    The batch is the first dimension of the arguments as a rule. Where that may be time, a split is
    tried now: it tells which dimension it is.
    """
    kwargs = without_cache(root.module, kwargs)
    lost = "how many samples a call of the model has cannot be told"
    batch = beside(lambda: Batch.of(args, kwargs), None, lost)
    if batch is None or not script_facts.batch_dimension_uncertain(facts, batch):
        return facts
    dim: int | None = root.proof.evidence.get(BATCH)
    if dim is None:
        try:
            outcome = attempt(lambda: root.layout(batch), corroborated=meter.short)
        except Refused:  # a plan that splits the batch is refused later, with the reason
            outcome = Outcome()
        if outcome.value is not None:
            dim = outcome.value.dim
            root.proof.evidence.put(dim, BATCH)
    if dim is None or not (batched := batched_arguments(batch, dim)):
        return replace(facts, batch_doubted=True)
    root.batch_dim = dim
    return replace(facts, batch=Layout(dim, batched, ()).size(batch))
