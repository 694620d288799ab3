"""A small work for each technique on which a search picks it, under a cap that rules out others."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from autofit.plan import Plan
from autofit.strategies import get
from autofit.worker.launch.launcher import launch
from autofit.worker.records.trials import LaunchRequest, Script, TrialReport

Command = Callable[..., subprocess.CompletedProcess[str]]


@dataclass(frozen=True, kw_only=True)
class Work:
    """A script, and the share of what it needs as it is that the search is given."""

    picked: tuple[str, str]
    """Strategy and level."""
    script: str
    share: float
    beside: tuple[str, ...] = ()
    """Other strategies that the search may choose."""
    allow: str = "rounding"
    needs: str = "torch"
    """A package without which it is left out."""


VOCABULARY = """\
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8192, 16)
        self.head = nn.Linear(16, 8192)

    def forward(self, tokens):
        logits = self.head(self.embedding(tokens[:, :-1]))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    loss = model(torch.randint(8192, (16, 64)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

PAIRS = """\
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
torch.set_num_threads(1)
config = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=512,
)
model = LlamaForCausalLM._from_config(config, attn_implementation="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    tokens = torch.randint(32, (4, 512))
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

PARAMETERS = """\
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(m.lerp(p.grad, 1 - group["betas"][0]).sign_(), alpha=group["lr"])
                m.lerp_(p.grad, 1 - group["betas"][1])


model = nn.Sequential(*(nn.Linear(384, 384) for _ in range(16)))
optimizer = OPTIMIZER
for step in range(60):
    x = torch.randn(4, 384)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def of_parameters(optimizer: str) -> str:
    """Return a script whose memory is in its parameters, gradients and optimizer."""
    return PARAMETERS.replace("OPTIMIZER", f"{optimizer}(model.parameters(), lr=1e-4)")


DEEP = """\
import time

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = PRODUCT
        for _ in range(6):
            h = h * (0.5 - 0.001 * h)
        return x + h


model = nn.Sequential(*(Block() for _ in range(9)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for step in range(60):
    x = torch.randn(1024, WIDTH)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
"""Its blocks save much that is quickly made."""


def of_blocks(width: int, product: str) -> str:
    """Return a script of such blocks."""
    return DEEP.replace("WIDTH", str(width)).replace("PRODUCT", product)


WAITING = "self.inner(x).relu_() if time.sleep(0.005) is None else x"
"""In place, and slow: each block waits 5 ms."""
LAYERS = """\
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


model = nn.Sequential(*(Block() for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(60):
    x = torch.randn(SAMPLES, 256)
    loss = (model(x) - x.roll(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

TOKENS = VOCABULARY.replace("8192", "512").replace("(16, 64)", "(16, 256)")

FOREACH = "(lambda *a, **k: torch.optim.RMSprop(*a, **k, foreach=True))"

PADDED = """\
import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 64)
        layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(64, 64)

    def forward(self, input_ids, attention_mask, labels):
        logits = self.head(self.layers(self.embedding(input_ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def sample():
    tokens = torch.randint(64, (256,))
    mask = (torch.arange(256) < int(torch.randint(8, 32, ()))).long()
    labels = tokens.masked_fill(mask == 0, -100)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in DataLoader([sample() for _ in range(640)], batch_size=16):
    optimizer.zero_grad()
    model(**batch).backward()
    optimizer.step()
"""

SLOW_DATA = """\
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
torch.set_num_threads(1)


class Slow(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.full((16,), index / 4096)


model = nn.Sequential(nn.Linear(16, 4096), nn.Tanh(), nn.Linear(4096, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in DataLoader(Slow(), batch_size=16, shuffle=True):
    optimizer.zero_grad()
    (model(batch) - batch).square().mean().backward()
    optimizer.step()
"""

PICTURES = """\
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
layers = [nn.Conv2d(3, 16, 3, padding=1)]
for _ in range(4):
    layers += [nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(200):
    optimizer.zero_grad()
    model(torch.randn(32, 3, 32, 32)).square().mean().backward()
    optimizer.step()
"""

WORKS = [
    Work(picked=("checkpointing", "auto"), script=of_blocks(64, WAITING), share=0.8),
    Work(picked=("loss", "chunked"), script=VOCABULARY, share=0.7, beside=("checkpointing",)),
    Work(picked=("attention", "sdpa"), script=PAIRS, share=0.6, beside=("precision",)),
    Work(picked=("optimizer", "single"), script=of_parameters(FOREACH), share=0.85),
    Work(
        picked=("gradient_release", "released"),
        script=of_parameters("torch.optim.SGD"),
        share=0.7,
        beside=("checkpointing", "micro_batch"),
    ),
    Work(picked=("optimizer", "eight_bit"), script=of_parameters("Lion"), share=0.9),
    Work(
        picked=("optimizer", "adafactor"),
        script=of_parameters("torch.optim.AdamW"),
        share=0.62,
        allow="recipe",
    ),
    Work(picked=("padding", "trimmed"), script=PADDED, share=1.2),
    Work(picked=("data_loading", "workers"), script=SLOW_DATA, share=3.0),
    Work(picked=("memory_format", "channels_last"), script=PICTURES, share=1.2),
    Work(
        picked=("adapters", "lora"),
        script=LAYERS.replace("SAMPLES", "8"),
        share=0.5,
        allow="recipe",
        needs="peft",
    ),
    Work(
        picked=("adapters", "qlora"),
        script=LAYERS.replace("SAMPLES", "256"),
        share=0.46,
        allow="recipe",
        needs="peft",
    ),
    Work(picked=("weights", "bf16_master"), script=of_parameters("torch.optim.AdamW"), share=0.95),
    Work(
        picked=("weights", "bf16"),
        script=of_parameters("torch.optim.AdamW"),
        share=0.7,
        allow="recipe",
    ),
    Work(picked=("batch_size", "quarter"), script=TOKENS, share=0.4, allow="recipe"),
    Work(picked=("sequence_length", "half"), script=TOKENS, share=0.75, allow="recipe"),
]


@pytest.mark.full
@pytest.mark.parametrize("work", WORKS, ids=lambda work: "-".join(work.picked))
def test_a_search_picks_it(work: Work, command: Command, tmp_path: Path) -> None:
    pytest.importorskip(work.needs)
    (tmp_path / "train.py").write_text(work.script)
    memory = int(peak_of(tmp_path) * work.share)
    name, level = work.picked
    only = [word for each in (name, *work.beside) for word in ("--only", each)]
    asked = ["--memory", str(memory), "--allow", work.allow, *only, "--json"]
    ran = command("search", "train.py", *asked, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(ran.stdout)
    assert get(name).searched(found["plan"][name]) == level
    assert found["peak_bytes"] <= memory


def peak_of(folder: Path) -> int:
    """Return the bytes that the script in ``folder`` needs as it is."""
    request = LaunchRequest(
        script=Script(target="train.py", cwd=str(folder)),
        plans=(Plan(),),
        device="cpu",
        budget=1 << 32,
        timeout=60,
    )
    (report,) = (each for each in launch(request) if isinstance(each, TrialReport))
    assert report.measurement is not None, report
    return report.measurement.peak_device
