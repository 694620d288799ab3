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
    root: HarnessRoot, facts: RootFacts, args: Any, kwargs: Any, meter: Meter, *, splits: bool
) -> RootFacts:
    """Return ``facts`` with the samples of a root's first call.

    ``splits``: a plan may split the batch, so verify now how. This must happen before the weights
    change: a diverged model gives every sample the same output, and any rule of joining chunks
    would then look right. If nothing is split, an earlier process may have found which dimension is
    the batch.
    """
    kwargs = without_cache(root.module, kwargs)
    lost = "how many samples a call of the model has cannot be told"
    batch = beside(lambda: Batch.of(args, kwargs), None, lost)
    if batch is None:
        return facts
    dim: int | None = root.proof.evidence.get(BATCH)
    if splits:
        try:
            outcome = attempt(lambda: root.layout(batch), corroborated=meter.short)
        except Refused:  # a plan that splits the batch is refused later, with the reason
            outcome = Outcome()
        if (layout := outcome.value) is not None:
            before, dim = dim, layout.dim
            facts = replace(facts, dropout=facts.dropout or layout.draws)
            if dim != before:
                root.proof.evidence.put(dim, BATCH)
    if dim is None or not (batched := batched_arguments(batch, dim)):
        uncertain = script_facts.batch_dimension_uncertain(facts, batch)
        return replace(facts, batch_doubted=uncertain)
    return replace(facts, batch=Layout(dim, batched, ()).size(batch))
