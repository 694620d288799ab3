"""A model whose weights exceed the memory of a rank trains on real cards as it does plainly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autofit.worker import meter
from tests.harness.ranks.trainings import deep

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

TRAIN = (
    """\
import sys
import torch
from torch import nn

torch.manual_seed(0)


"""
    + deep(words=512, width=2048, inner=8192, blocks=32)
    + """

with torch.device("cuda"):
    model = Deep()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(5):
    x, y = (torch.randint(512, (8, 16), device="cuda") for _ in range(2))
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(float(loss.detach()))
"""
)
"""Its weights have 4.3 GB. Those of one block have 134 MB."""


def losses(folder: Path, *words: str) -> list[float]:
    """Run the script; return the losses of its steps."""
    done = subprocess.run(
        [sys.executable, *words, "train.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    assert "cannot be used" not in done.stderr
    assert "out of memory" not in done.stderr
    return [float(line) for line in done.stdout.split()]


@pytest.mark.parametrize(
    ("ranks", "level", "memory"),
    [("2", "full", "7.5GiB"), ("2", "full_offload", "4GiB"), ("as_is", "full_offload", "4GiB")],
)
def test_the_losses_are_those_of_one_process(
    tmp_path: Path, ranks: str, level: str, memory: str
) -> None:
    if len(meter.cards()) < (1 if ranks == "as_is" else int(ranks)):
        pytest.skip("needs more GPUs")
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "plan.json").write_text(json.dumps({"plan": {"ranks": ranks, "sharding": level}}))
    options = ["--plan", "plan.json", "--memory", memory, "--storage", "sqlite:///store.db"]
    found = losses(tmp_path, "-m", "autofit", "run", *options)
    assert found == pytest.approx(losses(tmp_path), rel=1e-3)
