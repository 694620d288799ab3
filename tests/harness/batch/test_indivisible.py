"""The proof of a plan for a model that runs on all samples of a call, or on none."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.strategies import Facts
from autofit.worker.harness.batch.layout import Batch
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.harness.session.script_facts import describe
from autofit.worker.harness.verification.plan_check import prove
from autofit.worker.harness.verification.split_check import find_layout
from tests.roots import Notes, Rooted
from tests.strategies.sessions import under

pytestmark = pytest.mark.quick
NODES = 12


class Carried(nn.Module):
    """Takes its state from the call before, with the batch in its second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True)

    def forward(self, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]) -> Any:
        with torch.backends.mkldnn.flags(enabled=False):  # not every CPU has its LSTM in bf16
            return self.lstm(x, state)


class Graph(nn.Module):
    """Mixes the nodes of a graph, as its adjacency or the ends of its edges say."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 32), nn.Linear(32, 4)
        self.sizes: Notes[int] = Notes()

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        hidden = torch.tanh(self.inner(x))
        if not edges.is_floating_point():
            mixed = torch.zeros_like(hidden).index_add(0, edges[1], hidden[edges[0]])
        elif edges.layout is torch.strided:
            mixed = (edges.to(hidden.dtype)[:, :, None] * hidden[None]).sum(1)
        else:
            with torch.autocast("cpu", enabled=False):
                mixed = torch.sparse.mm(edges, hidden.float())
        found: torch.Tensor = self.outer(mixed)
        return found


def ring() -> torch.Tensor:
    return torch.eye(NODES).roll(1, 0)


def ends() -> torch.Tensor:
    return torch.stack([torch.arange(NODES), torch.arange(NODES).roll(1)])


def proven(module: nn.Module, rooted: Rooted, *args: Any) -> HarnessRoot:
    held = rooted(module)
    prove(held, Plan.of({"precision": "bf16"}), args, {}, Facts())
    return held


def test_a_state_as_large_as_the_batch(rooted: Rooted) -> None:
    state = torch.zeros(1, 6, 16)
    held = proven(Carried(), rooted, torch.randn(6, 3, 8), (state, state))
    assert held.proof.difference is not None
    assert 0 < held.proof.difference < 0.1


@pytest.mark.parametrize("edges", [ring(), ring().to_sparse()])
def test_nodes_that_are_mixed(rooted: Rooted, edges: torch.Tensor) -> None:
    held = proven(Graph(), rooted, torch.randn(NODES, 8), edges)
    assert held.proof.difference is not None
    assert 0 < held.proof.difference < 0.1


def test_nodes_that_edges_point_at_are_never_a_few(rooted: Rooted) -> None:
    graph = Graph()
    held = proven(graph, rooted, torch.randn(NODES, 8), ends())
    assert held.proof.difference is not None
    assert set(graph.sizes) == {NODES}


def test_what_fails_on_all_of_them_is_an_error(rooted: Rooted) -> None:
    with pytest.raises(RuntimeError, match="hidden"):
        proven(Carried(), rooted, torch.randn(6, 3, 8), (torch.zeros(1, 5, 16),) * 2)


def test_a_sparse_argument_carries_no_batch() -> None:
    args = (torch.randn(NODES, 8), ring().to_sparse())
    assert describe(Graph(), args, {}).batch == NODES
    graph = Graph()
    with pytest.raises(Refused, match="raises RuntimeError for a part"):
        find_layout(graph, graph.forward, Batch.of(args, {}))


class Mixing(nn.Module):
    """Takes the mean of its whole input, whichever dimension is the batch, or none."""

    def __init__(self, *, mixes: bool) -> None:
        super().__init__()
        self.embedding, self.line, self.mixes = nn.Embedding(8, 4), nn.Linear(4, 4), mixes

    def forward(self, x: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        hidden: torch.Tensor = x if x.is_floating_point() else self.embedding(x)
        hidden = self.line(hidden)
        return hidden - hidden.mean() if self.mixes else hidden


TOKENS, SEQUENCES = torch.randint(8, (7, 5)), torch.randn(7, 5, 4)


@pytest.mark.parametrize(
    ("args", "mixes", "doubted"),
    [
        ((TOKENS,), True, True),
        ((SEQUENCES,), True, True),
        ((TOKENS,), False, False),
        ((TOKENS, torch.ones(7)), True, False),
        ((torch.randn(7, 4),), True, False),
        ((torch.randn(7, 3, 5, 4),), True, False),
        ((torch.randint(8, (5, 5)),), True, False),
    ],
    ids=["tokens", "sequences", "split", "lengths", "vectors", "images", "square"],
)
def test_samples_are_doubted_where_time_may_come_first(
    args: tuple[torch.Tensor, ...], mixes: bool, doubted: bool
) -> None:
    net = Mixing(mixes=mixes)
    with under(Plan.of({"micro_batch": "2"})) as session:
        with pytest.raises(Refused) if mixes else nullcontext() as refused:
            net(*args)
        (root,) = session.facts.roots
    if refused is not None:
        assert ("; if the batch is the second dimension: " in str(refused.value)) is doubted
    assert (root.batch, root.batch_doubted) == (len(args[0]), doubted)


class Recurrent(nn.Module):
    """Returns what an LSTM makes of each point in time."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=batch_first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.lstm(x)[0]
        return found


@pytest.mark.parametrize(("batch_first", "dim", "samples"), [(True, 0, 7), (False, 1, 5)])
def test_samples_do_not_depend_on_one_another_and_points_in_time_do(
    batch_first: bool, dim: int, samples: int
) -> None:
    net = Recurrent(batch_first=batch_first)
    with under(Plan()) as session:
        torch.manual_seed(0)
        net(SEQUENCES)
        drawn = torch.rand(())
        (facts,), (held,) = session.facts.roots, session.roots
    assert (facts.batch, facts.batch_doubted, held.batch_dim) == (samples, False, dim)
    torch.manual_seed(0)
    assert drawn == torch.rand(()), "the forwards that tell leave random state as it was"
