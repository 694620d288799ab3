"""What a model draws by hand counts as dropout, once the proof of its split has shown it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from autofit.plan import Plan
from autofit.strategies import Fidelity
from tests.strategies.sessions import under

pytestmark = pytest.mark.quick


class Locked(nn.Module):
    """Drops the same features at each step in time, as language models of LSTMs do."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.body = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x.new_ones(x.shape[0], 1, 4)
        if self.training and self.rate:
            kept = kept.bernoulli_(1 - self.rate) / (1 - self.rate)
        output: torch.Tensor = self.body(x * kept)
        return output


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_split_draws_otherwise(rate: float) -> None:
    plan = Plan.of({"micro_batch": "2"})
    with under(plan) as session:
        Locked(rate)(torch.randn(6, 6, 4)).square().mean().backward()
        facts = session.roots[0].facts
        assert facts is not None
        assert facts.dropout is (rate > 0)
        fidelity = plan.fidelity(replace(session.facts, roots=(facts,)))
        assert fidelity is (Fidelity.REDRAW if rate else Fidelity.EXACT)


def test_the_batch_of_a_model_that_draws_for_each_sample() -> None:
    """Points in time share what is drawn, but they are no samples for that."""
    with under(Plan()) as session:
        Locked(0.5)(torch.randn(6, 3, 4)).square().mean().backward()
        (root,) = session.roots
        assert root.facts is not None
        assert (root.batch_dim, root.facts.batch) == (0, 6)
