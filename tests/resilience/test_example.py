"""What shows the decorators runs: the example and the benchmark in little memory, the documents."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import autofit

CAP = [sys.executable, "-m", "autofit.worker.cap"]


def run(command: list[str], where: Path) -> str:
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_a_batch_that_is_four_times_as_long(root: Path, tmp_path: Path) -> None:
    example = [sys.executable, str(root / "examples/resilient_finetune.py"), "--device", "cpu"]
    options = ["--steps", "6", "--memory-hungry", "4", "--width", "32"]
    plain = run([*example, *options, "--losses", "plain"], tmp_path)
    assert plain.startswith("done: 6 steps")
    capped = run([*CAP, "12MiB", "--", *example, *options, "--losses", "capped"], tmp_path)
    assert "out of memory with 32 samples at a time; goes on with 16" in capped
    losses = [
        [float(line) for line in (tmp_path / name).read_text().split()]
        for name in ("plain", "capped")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.full
def test_side_by_side_with_accelerate(root: Path, tmp_path: Path) -> None:
    benchmark = [sys.executable, str(root / "benchmarks/resilient.py"), "--device", "cpu"]
    found = json.loads(run([*CAP, "24MiB", "--", *benchmark, "--batch-size", "32"], tmp_path))
    assert found["autofit"]["effective_batch"] == 32
    assert found["accelerate"]["effective_batch"] < 32
    assert 1 < found["autofit"]["attempts"] <= found["accelerate"]["attempts"]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("document", "heading"),
    [
        ("README.md", "## A loop of your own"),
        *[
            ("docs/tutorials/surviving-run.md", f"## A {what} that fits")
            for what in ("batch size", "plan", "step")
        ],
    ],
)
def test_documents_show_what_runs(root: Path, document: str, heading: str) -> None:
    """Each block runs with what it leaves to the reader: a model, its data, its loss."""
    section = (root / document).read_text().split(f"{heading}\n")[1].split("\n## ")[0]
    assert len(section.splitlines()) < 40 or document != "README.md"
    (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    data = {"x": torch.randn(8, 4), "y": torch.randint(0, 3, (8,))}
    model = nn.Linear(4, 3)
    names: dict[str, Any] = {
        "__name__": "shown",
        "data": data,
        "loader": [data, data],
        "functional": functional,
        "model": lambda x: model(x["x"] if isinstance(x, dict) else x),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "make_model": lambda: (model, torch.optim.SGD(model.parameters(), lr=0.1)),
        "loss_of": lambda y: y.pow(2).mean(),
    }
    exec(block, names)
    if "step" in names:
        model.zero_grad()
        with autofit.resilient.inject(1):
            names["step"](data)
        assert model.weight.grad is not None
    for name in names.keys() & {"train", "train_under"}:
        names[name](data)
