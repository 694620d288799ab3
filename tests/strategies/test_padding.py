"""Padding that all samples share is not computed: the same training on fewer tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.strategies import Facts, Fidelity, RootFacts, get
from autofit.worker.harness.measurement.same_batches import size
from tests.strategies.sessions import under

pytestmark = pytest.mark.quick

TRIMMED = Plan.of({"padding": "trimmed"})
TOKENS = 32
Batch = dict[str, torch.Tensor]
Loss = Callable[[Any, Batch], torch.Tensor]


def gpt2(dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=64, n_positions=TOKENS, n_embd=16, n_layer=2, n_head=2, use_cache=False
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = dropout
    torch.manual_seed(0)
    model: nn.Module = GPT2LMHeadModel(config)
    return model.train()


def batch(*lengths: int, seed: int = 0) -> Batch:
    """Return samples of these lengths, padded to one."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(64, (len(lengths), TOKENS), generator=generator)
    mask = (torch.arange(TOKENS) < torch.tensor(lengths)[:, None]).long()
    return {
        "input_ids": tokens * mask,
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, -100),
    }


BATCHES = [batch(5, 9, 12, 7), batch(3, 17, 2, 20, seed=1), batch(32, 30, 4, 1, seed=2)]


def inside(output: Any, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = output.loss
    return loss


def outside(output: Any, batch: Batch) -> torch.Tensor:
    """Return a loss that counts padding too."""
    loss: torch.Tensor = output.loss + output.logits.square().mean()
    return loss


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each sample in every call of a model's embedding."""
    seen: list[int] = []
    plain = nn.functional.embedding

    def embedding(tokens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if tokens.ndim == 2 and tokens.shape[0] > 1:
            seen.append(tokens.shape[1])
        return plain(tokens, *args, **kwargs)

    monkeypatch.setattr(nn.functional, "embedding", embedding)
    return seen


def train(
    model: nn.Module, plan: Plan, loss: Loss = inside, batches: list[Batch] = BATCHES
) -> tuple[list[float], torch.Tensor]:
    """Return the losses and the parameters that training comes to."""
    trained = copy.deepcopy(model)
    losses = []
    with under(plan):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
        for each in batches:
            optimizer.zero_grad()
            found = loss(trained(**each), each)
            found.backward()
            optimizer.step()
            losses.append(float(found.detach()))
    return losses, torch.cat([p.detach().flatten() for p in trained.parameters()])


@pytest.mark.parametrize(
    ("loss", "other"),
    [
        (inside, {}),
        (inside, {"micro_batch": "2"}),
        (inside, {"checkpointing": "all"}),
        (outside, {}),
        (outside, {"checkpointing": "all"}),
    ],
    ids=["inside", "inside split", "inside checkpointed", "outside", "outside checkpointed"],
)
def test_it_is_the_same_training(loss: Loss, other: dict[str, str]) -> None:
    model = gpt2()
    losses, weights = train(model, Plan(), loss)
    found, changed = train(model, TRIMMED.replace(**other), loss)
    assert found == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(changed, weights, rtol=1e-4, atol=1e-6)


def test_it_computes_fewer_tokens(lengths: list[int]) -> None:
    model = gpt2()
    with under(TRIMMED):
        model(**BATCHES[0])  # proven
        lengths.clear()
        for each in BATCHES:
            model(**each)
    assert [length for length in lengths if length > 1] == [16, 24, 32]


def test_each_part_of_a_batch_is_cut_by_itself(lengths: list[int]) -> None:
    model = gpt2()
    with under(TRIMMED.replace(micro_batch="2")):
        for _ in range(2):
            lengths.clear()
            model.zero_grad()
            model(**BATCHES[2]).loss.backward()
    assert sorted(lengths) == [8, 32]


def test_evaluation_is_left_alone(lengths: list[int]) -> None:
    model = gpt2()
    with under(TRIMMED):
        model(**BATCHES[0])
        lengths.clear()
        model.eval()
        with torch.no_grad():
            model(**BATCHES[0])
    assert lengths == [TOKENS]


def test_an_output_of_tokens_is_whole_when_it_is_used() -> None:
    model = gpt2()
    expected = model(**BATCHES[0]).logits
    with under(TRIMMED):
        found = model(**BATCHES[0]).logits
        assert found.shape == expected.shape
        torch.testing.assert_close(found[:, -1], expected[:, -1])
        torch.testing.assert_close(torch.softmax(found, -1), torch.softmax(expected, -1))
        assert torch.equal(found.argmax(-1), expected.argmax(-1))
        torch.testing.assert_close(2 - found / 2, 2 - expected / 2)


def test_after_a_step_it_is_lost() -> None:
    model = gpt2()
    with under(TRIMMED):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        output = model(**BATCHES[0])
        output.loss.backward()
        optimizer.step()
        with pytest.raises(Refused, match="after the weights have changed"):
            output.logits.sum()


def test_a_split_batch_keeps_no_graph_of_it() -> None:
    with pytest.raises(Refused, match="but a split batch keeps no graph"):
        train(gpt2(), TRIMMED.replace(micro_batch="2"), outside)


def test_labels_that_count_are_not_cut(lengths: list[int]) -> None:
    each = BATCHES[0] | {"labels": BATCHES[0]["input_ids"]}  # padding is learned too
    model = gpt2()
    with under(TRIMMED):
        model(**BATCHES[0])
        lengths.clear()
        model(**each)
    assert lengths == [TOKENS]


def test_dropout_draws_otherwise(lengths: list[int]) -> None:
    model = gpt2(dropout=0.1)
    with under(TRIMMED) as session:
        for each in BATCHES[:2]:
            lengths.clear()
            model(**each)
        assert lengths == [24]
        assert get("padding").fidelity("trimmed", session.facts) is Fidelity.REDRAW
        assert all(each.p == 0.1 for each in model.modules() if isinstance(each, nn.Dropout))


class Mean(nn.Module):
    """Takes the mean over all tokens, padding included."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **more: Any) -> Any:
        return self.head(self.embedding(input_ids).mean(1)).mean()


def test_a_model_that_counts_padding_is_refused() -> None:
    with under(TRIMMED), pytest.raises(Refused, match="the gradients differ"):
        Mean()(**BATCHES[0])


def test_an_argument_that_may_be_of_tokens_is_refused() -> None:
    with under(TRIMMED), pytest.raises(Refused, match="weights may hold a value for each token"):
        Mean()(**BATCHES[0], weights=torch.ones(4, TOKENS))


ROOT = RootFacts(
    name="Model", parameters=9, parameter_bytes=36, trainable=9, dtype="float32", padding=0.5
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"padding": 0.01}, "almost no padding"),
        ({"batch_norm": True}, "BatchNorm"),
        ({"compiled": True}, "compiled anew"),
    ],
)
def test_where_it_applies(changes: dict[str, Any], reason: str | None) -> None:
    found = get("padding").inapplicable("trimmed", Facts(roots=(replace(ROOT, **changes),)))
    assert reason is None if found is None else reason is not None and reason in found


def test_the_share_of_padding_is_learned() -> None:
    model = gpt2()
    with under(Plan()) as session:
        model(**BATCHES[0])
    assert session.facts.roots[0].padding == 1 - (5 + 9 + 12 + 7) / (4 * TOKENS)


def test_the_longest_of_padded_batches_is_the_largest() -> None:
    assert max(BATCHES, key=size) is BATCHES[2]
    assert size(BATCHES[0]) < size(BATCHES[1])
    assert size({"x": torch.zeros(2, 3)}) == size([torch.zeros(2, 3)]) == 24
