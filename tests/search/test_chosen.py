"""A small work for each technique on which a search picks it, under a cap that rules out others."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from autofit.plan import Plan
from autofit.worker.launcher import launch
from autofit.worker.records import LaunchRequest, Script, TrialReport

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

WORKS = [Work(picked=("loss", "chunked"), script=VOCABULARY, share=0.7, beside=("checkpointing",))]


@pytest.mark.full
@pytest.mark.parametrize("work", WORKS, ids=lambda work: "-".join(work.picked))
def test_a_search_picks_it(work: Work, command: Command, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(work.script)
    memory = int(peak_of(tmp_path) * work.share)
    name, level = work.picked
    only = [word for each in (name, *work.beside) for word in ("--only", each)]
    ran = command("search", "train.py", "--memory", str(memory), *only, "--json", cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(ran.stdout)
    assert found["plan"][name] == level
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
