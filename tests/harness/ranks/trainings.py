"""What the tests of ranks share: scripts, the way they are run, and comparisons."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

HEAD = """\
import os, sys
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
torch.manual_seed(1)


class Noted(nn.Module):
    # Writes the number of samples that it sees to a file.
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        if "NOTES" in os.environ and self.training:
            with open("notes", "a") as file:
                print(len(x), file=file)
        return self.inner(x)


"""
_DEEP = """\
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm({width})
        wide, narrow = nn.Linear({width}, {inner}), nn.Linear({inner}, {width})
        self.mlp = nn.Sequential(wide, nn.GELU(), narrow)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding({words}, {width})
        self.blocks = nn.ModuleList([Block() for _ in range({blocks})])
        self.head = nn.Linear({width}, {words}, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
"""
LANGUAGE = """\
class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(17, 16)
        self.block = Noted(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)))
        self.head = nn.Linear(16, 17, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x, labels):
        logits = self.head(self.block(self.tokens(x)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)
        return logits, loss


model = Language()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
print(torch.distributed.is_initialized(), "RANK" in os.environ, "WORLD_SIZE" in os.environ)
for step in range(20):
    for part in range(2):
        x, labels = torch.randint(17, (7, 5)), torch.randint(17, (7, 5))
        labels[0, :3] = -1
        _, loss = model(x, labels)
        (loss / 2).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if step % 5 == 4:
        model.eval()
        with torch.no_grad():
            _, value = model(x, labels)
        model.train()
        print(step, f"{float(loss):.9f} {float(norm):.9f} {float(value):.9f}")
"""
IMAGES = """\
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(49, 3, 8, 8), torch.randint(5, (49,)))
model = nn.Sequential(
    Noted(nn.Conv2d(3, 8, 3)),
    nn.BatchNorm2d(8),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(8, 5),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(3):
    for x, labels in DataLoader(data, batch_size=8, shuffle=True):
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, f"{float(loss):.9f}")
"""
ADVERSARIES = """\
maker = nn.Sequential(Noted(nn.Linear(4, 16)), nn.Tanh(), nn.Linear(16, 3))
judge = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
model = nn.ModuleList([maker, judge])
makes = torch.optim.Adam(maker.parameters(), 1e-2)
judges = torch.optim.Adam(judge.parameters(), 1e-2)
score = nn.functional.binary_cross_entropy_with_logits
for step in range(20):
    real, made = torch.randn(6, 3) + 2, maker(torch.randn(6, 4))
    judges.zero_grad()
    right = score(judge(real), torch.ones(6, 1)) + score(judge(made.detach()), torch.zeros(6, 1))
    right.backward()
    judges.step()
    makes.zero_grad()
    wrong = score(judge(made), torch.ones(6, 1))
    wrong.backward()
    makes.step()
print(f"{float(right):.9f} {float(wrong):.9f}")
"""
SEQUENCES = """\
class Sequences(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(4, 8, batch_first=True)
        self.head = Noted(nn.Linear(8, 1))

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


model = Sequences()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
for step in range(20):
    x, y = torch.randn(6, 5, 4), torch.randn(6, 5, 4)
    first, second = model(x), model(y)
    loss = (first - x.sum((1, 2))[:, None]).square().mean() + second.abs().mean()
    loss = loss + 1e-3 * sum(p.square().sum() for p in model.parameters())
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"{float(loss):.9f} {float(sum(p.grad.norm() for p in model.parameters())):.6f}")
    if float(loss) < 1.6 or step == 15:
        break
"""
TOWERS = """\
class Towers(nn.Module):
    # Compares each picture with each text of the batch.
    def __init__(self):
        super().__init__()
        see = Noted(nn.Conv2d(3, 8, 3))
        self.image = nn.Sequential(see, nn.GELU(), nn.Flatten(), nn.Linear(288, 6))
        self.words = nn.Embedding(17, 8)
        self.text = nn.Sequential(Noted(nn.Linear(8, 16)), nn.Tanh(), nn.Linear(16, 6))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image, text):
        i = nn.functional.normalize(self.image(image), dim=-1)
        t = nn.functional.normalize(self.text(self.words(text)).mean(1), dim=-1)
        return self.scale.exp() * i @ t.T


model = Towers()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(5):
    image, text = torch.randn(9, 3, 8, 8), torch.randint(17, (9, 5))
    optimizer.zero_grad()
    logits, labels = model(image, text), torch.arange(9)
    both = [nn.functional.cross_entropy(each, labels) for each in (logits, logits.T)]
    sum(both).backward()
    optimizer.step()
    print(step, *(f"{float(p.grad.norm()):.10f}" for p in model.parameters()))
"""
VIEWS = """\
class Views(nn.Module):
    # Computes the loss of SimCLR in its forward.
    def __init__(self):
        super().__init__()
        see, wide = Noted(nn.Conv2d(3, 8, 3)), nn.Linear(288, 16)
        self.encoder = nn.Sequential(see, nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), wide)
        norm, narrow = nn.BatchNorm1d(16), nn.Linear(16, 6)
        self.head = nn.Sequential(nn.Linear(16, 16), norm, nn.ReLU(), narrow)

    def forward(self, one, other):
        made = [self.head(self.encoder(each)) for each in (one, other)]
        z = nn.functional.normalize(torch.cat(made), dim=-1)
        alike = (z @ z.T / 0.2).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
        return nn.functional.cross_entropy(alike, torch.arange(len(z)).roll(len(one)))


model = Views()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(5):
    image = torch.randn(8, 3, 8, 8)
    optimizer.zero_grad()
    loss = model(image, image + 0.1 * torch.randn_like(image))
    loss.backward()
    optimizer.step()
    print(step, *(f"{float(p.grad.norm()):.9f}" for p in model.parameters()))
"""
CENTRED = """\
class Centred(nn.Module):
    # Subtracts the mean of the batch between two blocks that change samples one by one.
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(Noted(nn.Linear(6, 16)), nn.GELU(), nn.Linear(16, 16))
        self.last = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3))

    def forward(self, x):
        x = self.first(x)
        return self.last(x - x.mean(0))


model = Centred()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(5):
    x = torch.randn(9, 6)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), torch.randint(3, (9,))).backward()
    optimizer.step()
    print(step, *(f"{float(p.grad.norm()):.10f}" for p in model.parameters()))
"""
TAIL = """
torch.save(model.state_dict(), "out.pt")
print("written", os.path.getsize("out.pt") > 0)
"""
STOP = "import atexit\n\natexit.register(print, 'handlers run')\nsys.exit(3)\n"


@dataclass(frozen=True)
class Ran:
    """What a training came to."""

    code: int
    out: str
    err: str
    saved: Any
    """What ``out.pt`` holds; ``None`` if there is no such file."""
    files: list[str]


WITHOUT_OVERLAY = (
    "unshare",
    "--user",
    "--map-root-user",
    "sh",
    "-c",
    'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"',
    "sh",
)
"""Runs a command that cannot create user namespaces, and so has no overlay."""


def run(
    folder: Path,
    text: str,
    levels: dict[str, str] | None = None,
    before: tuple[str, ...] = (),
    memory: str | None = None,
) -> Ran:
    """Run a script in a folder of its own: under a plan, or plainly.

    ``before``: words before the command. ``memory``: that each rank may use under a plan.
    """
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(HEAD + text)
    command = [sys.executable, "train.py"]
    if levels is not None:
        plan = folder.parent / f"{folder.name}.json"
        plan.write_text(json.dumps({"plan": levels}))
        store = f"sqlite:///{folder.parent}/store.db"
        options = ["--plan", str(plan), "--storage", store]
        options += ["--memory", memory] if memory else []
        command = [sys.executable, "-m", "autofit", "run", *options, "train.py"]
    command = [*before, *command]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    saved = torch.load(folder / "out.pt") if (folder / "out.pt").exists() else None
    files = sorted(each.name for each in folder.iterdir() if each.name != "__pycache__")
    return Ran(done.returncode, done.stdout, done.stderr, saved, files)


def difference(one: Ran, other: Ran) -> float:
    """Return the largest difference of what two trainings have saved."""
    (left, form), (right, other_form) = tree_flatten(one.saved), tree_flatten(other.saved)
    assert form == other_form
    return max(_apart(a, b) for a, b in zip(left, right, strict=True))


def _apart(one: Any, other: Any) -> float:
    if isinstance(one, torch.Tensor):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        return float((one.double() - other.double()).abs().max())
    if isinstance(one, float):
        return abs(one - float(other))
    assert one == other
    return 0.0


def assert_same(
    tmp_path: Path, text: str, levels: dict[str, str], memory: str | None = None
) -> None:
    """A script is the same training under a plan, to the eye and to the last bits but a few."""
    plain = run(tmp_path / "plain", text)
    ranked = run(tmp_path / "ranked", text, levels, memory=memory)
    assert plain.saved is not None, plain.err
    assert (ranked.out, ranked.code) == (plain.out, plain.code), ranked.err
    assert "whole batch" not in ranked.err
    assert "cannot be used" not in ranked.err
    assert ranked.files == plain.files
    assert difference(plain, ranked) < 1e-9


def deep(*, words: int, width: int, inner: int, blocks: int) -> str:
    """Return the source of a model with repeated blocks, whose head has the embedding's weight."""
    return _DEEP.format(words=words, width=width, inner=inner, blocks=blocks)
