"""Predicted peaks: the replay of a step made by hand, and of real steps against measurements."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autofit.facts import Facts, RootFacts
from autofit.inspection.launches import Target, inspect
from autofit.inspection.prediction import Predictor, predictable
from autofit.plan import Plan
from autofit.worker.records.inspection import Inspection, Kind, Life, Timeline
from autofit.worker.records.trials import Script

LAST = 9
"""Operations 0 and 1 are the forward of two blocks, 2 is the loss, 3 to 6 are backward."""


def life(size: int, start: int, end: int, **changed: Any) -> Life:
    """Return an activation of a block, unless ``changed`` says otherwise."""
    fields: dict[str, Any] = {
        "used": start,
        "wanted": end,
        "kind": "",
        "block": -1,
        "of_block": False,
        "returned": False,
        "wide": False,
        "quantized": False,
    }
    return Life(size=size, start=start, end=end, **(fields | changed))


LIVES = (
    life(100, 0, LAST, kind=Kind.WEIGHTS),
    life(200, 0, LAST, kind=Kind.OPTIMIZER_STATE, quantized=True),
    life(60, 0, 5, block=0),
    life(10, 0, 5, block=0, of_block=True),
    life(60, 1, 4, block=1),
    life(10, 1, 4, block=1, of_block=True),
    life(5, 4, 7, kind=Kind.GRADIENTS),
    life(5, 5, 7, kind=Kind.GRADIENTS),
    life(40, 8, 8),
)
FACTS = Facts(
    roots=(
        RootFacts(
            name="Net",
            parameters=25,
            parameter_bytes=100,
            trainable=25,
            dtype="float32",
            batch=8,
            blocks=2,
        ),
    ),
    optimizers=("AdamW",),
)


def timeline() -> Timeline:
    peaks = [
        sum(each.size for each in LIVES if each.start <= index <= each.end) + 2 * (index == 3)
        for index in range(LAST + 1)
    ]
    return Timeline(
        lives=LIVES,
        lowered=tuple(each if each.kind else each._replace(size=each.size // 2) for each in LIVES),
        peaks=tuple(peaks),
        forward=(0, 1, 2),
        backward=(3, 4, 5, 6),
        blocks=("0", "1"),
    )


@pytest.mark.quick
@pytest.mark.parametrize(
    ("levels", "peak"),
    [
        ({}, 300 + 140 + 5),  # backward of block 1
        ({"precision": "bf16"}, 300 + 70 + 5),
        ({"checkpointing": "1"}, 300 + 10 + 70 + 5),  # backward of block 1
        ({"checkpointing": "all"}, 300 + 10 + 70 + 10),  # block 1 runs again beside its output
        ({"micro_batch": "2"}, 300 + 35 + 10 + 5),  # one weight has two gradients
        ({"optimizer": "fused"}, 445),
        ({"optimizer": "eight_bit"}, 100 + 0.27 * 200 + 140 + 5),
    ],
    ids=str,
)
def test_the_replay_of_a_step(levels: dict[str, str], peak: float) -> None:
    assert Predictor(timeline(), FACTS).peak(Plan.of(levels)) == pytest.approx(peak, abs=0.5)


@pytest.mark.quick
def test_a_plan_with_a_prior_is_an_estimate() -> None:
    bf16 = Plan.of({"checkpointing": "all", "precision": "bf16"})
    assert predictable(bf16, FACTS, cuda=False)
    assert not predictable(Plan.of({"compile": "full"}), FACTS, cuda=False)
    assert not Predictor(timeline(), FACTS).applies(Plan.of({"loss": "chunked"})), "no loss inside"
    dropout = replace(FACTS, roots=(replace(FACTS.roots[0], dropout=True),))
    assert predictable(bf16, dropout, cuda=True)
    assert not predictable(bf16, dropout, cuda=False)


TRANSFORMER = """
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)
        )

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4096, 64)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(64, 4096)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(40):
    loss = model(torch.randint(0, 4096, (16, 64)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
FIVE = (
    {"precision": "bf16"},
    {"checkpointing": "2"},
    {"checkpointing": "all"},
    {"micro_batch": "4"},
    {"loss": "chunked"},
)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_predicted_savings_are_within_15_per_cent_of_measured_ones(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRANSFORMER)
    script = Script(target="train.py", cwd=os.fspath(tmp_path))
    target = Target.on(script, memory=1 << 30)
    whole = inspect(target, Plan(), Inspection()).inspected
    assert whole is not None
    assert whole.plain is not None
    assert whole.timeline is not None
    assert whole.moments[0].peak == pytest.approx(whole.plain.allocated, rel=0.02)
    facts = inspect(target, Plan(), Inspection(steps=1, plain=1)).facts
    for levels in FIVE:
        plan = Plan.of(levels)
        found = inspect(target, plan, Inspection(steps=1, plain=1)).inspected
        assert found is not None
        assert found.plain is not None, levels
        saved = whole.plain.allocated - found.plain.allocated
        predicted = whole.plain.allocated - Predictor(whole.timeline, facts).peak(plan)
        assert predicted == pytest.approx(saved, rel=0.15), levels
