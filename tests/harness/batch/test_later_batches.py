"""What the first steps of a trial do not show: batches that cannot be split, calls, zeros."""

from __future__ import annotations

from pathlib import Path

import pytest

from autofit.plan import Plan
from autofit.worker.launch.launcher import launch
from autofit.worker.records.trials import (
    LaunchEvent,
    LaunchRequest,
    Learned,
    Script,
    TrialReport,
    Verdict,
)

pytestmark = pytest.mark.quick

SCRIPT = Path(__file__).parents[2] / "scripts" / "recurrent_state.py"


def test_a_split_that_later_batches_do_not_allow_is_refused(tmp_path: Path) -> None:
    """Its figures would be those of the whole batch, which a real run would use for them."""
    request = LaunchRequest(
        script=Script(target=str(SCRIPT), cwd=str(tmp_path)),
        plans=(Plan.of({"micro_batch": "4"}), Plan()),
        device="cpu",
        budget=1 << 30,
        timeout=60.0,
        steps=4,
    )
    split, whole = [event for event in launch(request) if isinstance(event, TrialReport)]
    assert (split.verdict, split.blamed) == (Verdict.REFUSED, "micro_batch")
    assert "a later batch cannot be split: the model raises RuntimeError for a part" in split.reason
    assert whole.verdict is Verdict.MEASURED


def measured(folder: Path, script: str, plan: Plan) -> list[LaunchEvent]:
    """Measure a plan of a script given as text."""
    (folder / "train.py").write_text(script)
    request = LaunchRequest(
        script=Script(target="train.py", cwd=str(folder)),
        plans=(plan,),
        device="cpu",
        budget=1 << 30,
        timeout=60.0,
    )
    return list(launch(request))


ZEROED = """\
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
optimizer = torch.optim.AdamW(net.parameters())
for step in range(100):
    nn.functional.cross_entropy(net(torch.randn(16, 64)), torch.arange(16) % 3).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
"""


def test_real_steps_refuse_what_the_script_shows_in_them(tmp_path: Path) -> None:
    """A gradient set to zero counts as one: no step in backward would know it."""
    plan = Plan.of({"gradient_release": "released", "micro_batch": "2"})
    heard = measured(tmp_path, ZEROED, plan)
    (report,) = [event for event in heard if isinstance(event, TrialReport)]
    assert (report.verdict, report.blamed) == (Verdict.REFUSED, "gradient_release")
    assert report.reason == "a gradient that the script has set to zero counts as one"


ACCUMULATED = """\
import torch
from torch import nn

net = nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(100):
    for part in range(4):
        (net(torch.randn(4, 8)).square().mean() / 4).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_what_is_known_of_a_step_is_known_of_all_its_calls(tmp_path: Path) -> None:
    """Not first that it was one, which would be told to people and believed by the search."""
    heard = measured(tmp_path, ACCUMULATED, Plan())
    learned = [event.facts for event in heard if isinstance(event, Learned)]
    assert {(f.calls_per_step, f.effective_batch) for f in learned if f.stepped} == {(4, 16)}


TRIED = """\
import torch
from torch import nn

net = nn.Linear(8, 1)
net(torch.randn(4, 8)).square().mean().backward()  # to write it down, as llm.c's script does
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(100):
    optimizer.zero_grad()
    for part in range(2):
        (net(torch.randn(4, 8)).square().mean() / 2).backward()
    optimizer.step()
"""
TWICE = """\
import torch
from torch import nn

net = nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(100):
    for part in range(2):
        optimizer.zero_grad()
        net(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
"""
EVALUATED = """\
import torch
from torch import nn

net, batch = nn.Linear(8, 1), torch.randn(4, 8)
optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3, tolerance_grad=0, tolerance_change=0)
def closure():
    optimizer.zero_grad()
    loss = net(batch).square().mean()
    loss.backward()
    return loss
for step in range(100):
    optimizer.step(closure)
"""


@pytest.mark.parametrize(
    ("script", "calls"),
    [(TRIED, [2]), (TWICE, [1, 2]), (EVALUATED, [3])],
    ids=["tried", "twice", "evaluated"],
)
def test_a_pass_whose_gradients_are_dropped_is_no_part_of_a_step(
    tmp_path: Path, script: str, calls: list[int]
) -> None:
    """Unless each step has one: the second shows it."""
    heard = measured(tmp_path, script, Plan())
    learned = [event.facts for event in heard if isinstance(event, Learned)]
    told = [f.calls_per_step for f in learned if f.stepped]
    assert list(dict.fromkeys(told)) == calls
    assert learned[-1].effective_batch == 4 * calls[-1]
