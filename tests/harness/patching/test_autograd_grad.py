"""Scripts that differentiate by themselves, under a plan that splits the batch.

They end with the parameters of the plain run; where the plan does not hold it is given up first.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.told import beside_the_check

pytestmark = pytest.mark.full

HEAD = """\
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 8)
        self.b = nn.Linear(8, 1)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    x = torch.randn(8, 4, requires_grad=True)
    y = model(x)
    loss = (y - x.detach().sum(1, keepdim=True)).pow(2).mean()
"""
TAIL = """
    optimizer.step()
    print(step, [round(float(p.detach().sum()), 11) for p in model.parameters()], flush=True)
"""
PARAMETERS = """
    loss = loss + model.b.weight.pow(2).sum()
    for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):
        p.grad = g
"""
LATE = """
    optimizer.zero_grad()
    if step < 2:
        loss.backward()
    else:
        one, other = torch.autograd.grad(loss, [model.a.weight, x], retain_graph=True)
        assert model.a.weight.grad is None
        loss.backward()
        print(float((one - model.a.weight.grad).abs().max()) < 1e-15)
        print(float(other.sum().round(decimals=9)))
"""
UNUSED = """
    extra = nn.Parameter(torch.ones(1))
    try:
        torch.autograd.grad(loss, [model.a.weight, extra], retain_graph=True)
    except RuntimeError as error:
        print(str(error)[-50:])
    print(torch.autograd.grad(loss, [extra, model.a.bias], retain_graph=True, allow_unused=True)[0])
    optimizer.zero_grad()
    loss.backward()
"""
SALIENCY = """
    (shown,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    print(float(shown.sum().round(decimals=9)))
    optimizer.zero_grad()
    loss.backward()
"""
PER_SAMPLE = """
    def one(params, row):
        return functional_call(model, params, (row.unsqueeze(0),)).pow(2).mean()

    params = {name: p.detach() for name, p in model.named_parameters()}
    each = vmap(grad(one), in_dims=(None, 0))(params, x.detach())
    print(float(each["a.weight"].norm(dim=(1, 2)).sum().round(decimals=9)))
    optimizer.zero_grad()
    loss.backward()
"""
PENALTY = """
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    optimizer.zero_grad()
    (loss + (slope.norm(dim=1) - 1).pow(2).mean()).backward()
"""
MAML = """
    steps = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    fast = {n: p - 0.1 * g for (n, p), g in zip(model.named_parameters(), steps)}
    optimizer.zero_grad()
    functional_call(model, fast, (x,)).pow(2).mean().backward()
"""
ONLY_PER_SAMPLE = f"""{HEAD.partition("    y = model")[0]}
    loss = x.sum()
{PER_SAMPLE.replace("loss.backward()", "pass")}
"""


def run(folder: Path, text: str, plan: dict[str, str] | None) -> subprocess.CompletedProcess[str]:
    """Run a script with Python alone, or under a plan."""
    (folder / "train.py").write_text(text)
    (folder / "plan.json").write_text(json.dumps({"plan": plan}))
    tuned = ["-m", "autofit", "run", "--plan", "plan.json"] if plan is not None else []
    done = subprocess.run(
        [sys.executable, *tuned, "train.py"],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    done.stderr = beside_the_check(done.stderr)
    return done


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(SALIENCY, id="saliency"),
        pytest.param(PENALTY, id="penalty"),
        pytest.param(PARAMETERS, id="parameters"),
        pytest.param(UNUSED, id="unused"),
        pytest.param(LATE, id="late"),
        pytest.param(PER_SAMPLE, id="per sample"),
    ],
)
def test_it_is_the_same(tmp_path: Path, body: str) -> None:
    text = HEAD + body + TAIL
    expected = run(tmp_path, text, None)
    found = run(tmp_path, text, {"micro_batch": "2"})
    assert found.stderr == expected.stderr == ""
    assert found.stdout == expected.stdout


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param(HEAD + MAML + TAIL, "create_graph", id="maml"),
        pytest.param(ONLY_PER_SAMPLE + TAIL, "torch.func", id="per sample"),
    ],
)
def test_it_is_given_up_before_anything_has_changed(tmp_path: Path, text: str, reason: str) -> None:
    expected = run(tmp_path, text, None)
    found = run(tmp_path, text, {"micro_batch": "2"})
    assert (found.returncode, found.stdout) == (0, expected.stdout)
    assert re.fullmatch(
        rf"autofit: micro 2 cannot be used here: .*{reason}.*; continuing under as it is\n",
        found.stderr,
    )


@pytest.mark.parametrize("body", [PENALTY, MAML, PER_SAMPLE], ids=["penalty", "maml", "per sample"])
def test_without_a_split_it_runs_plainly(tmp_path: Path, body: str) -> None:
    text = HEAD + body + TAIL
    expected = run(tmp_path, text, None)
    found = run(tmp_path, text, {})
    assert (found.stdout, found.stderr) == (expected.stdout, "")


def test_a_parameter_that_only_the_scripts_own_term_uses(tmp_path: Path) -> None:
    """The chunks have no gradient for it, and that of the term stays."""
    layer = "self.b = nn.Linear(8, 1)\n"
    head = HEAD.replace(layer, f"{layer}        self.c = nn.Parameter(torch.ones(3))\n")
    body = PARAMETERS.replace("model.b.weight.pow(2).sum()", "model.c.pow(3).sum()")
    expected = run(tmp_path, head + body + TAIL, None)
    found = run(tmp_path, head + body + TAIL, {"micro_batch": "2"})
    assert (found.stdout, found.stderr) == (expected.stdout, "")
