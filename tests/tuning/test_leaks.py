"""A search tells that a script keeps the graph of each step, and where; and of no other script."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from autofit.plan import Plan
from autofit.tuning import messages
from autofit.worker.launch.launcher import launch
from autofit.worker.records.inspection import Growth
from autofit.worker.records.trials import GraphsGrow, LaunchRequest, Script

LOOP = "for step in range(options.steps):"
STEP = "    optimizer.step()\n"
NUMBER = 'print(f"loss {loss.item():.9f}")'
AGAIN = "nn.functional.mse_loss(model(x), x.mean((1, 2)))"


@pytest.fixture
def observed(tiny: str, tmp_path: Path) -> Callable[..., list[Growth]]:
    """Return what the launch of a search tells of the tiny script with other text."""

    def run(before: str, after: str, batch: str = "64") -> list[Growth]:
        text = tiny.replace(LOOP, f"{before}\n{LOOP}").replace("randn(64", f"randn({batch}")
        text = text.replace(STEP, f"{STEP}    {after}\n")
        (tmp_path / "train.py").write_text(text)
        request = LaunchRequest(
            script=Script(target="train.py", cwd=str(tmp_path)),
            plans=(Plan(),),
            device="cpu",
            budget=1 << 30,
            timeout=60,
            steps=2,  # as many as a search observes
        )
        return [each.growth for each in launch(request) if isinstance(each, GraphsGrow)]

    return run


@pytest.mark.quick
@pytest.mark.parametrize(
    ("before", "after", "holder", "least"),
    [
        ("kept = []", "kept.append(loss)", "the list kept", 1),
        ("kept = []", f"kept.append({AGAIN})", "the list kept", 1 << 20),
        ("total = 0", "total += loss", "the variable total", 0),
        ("total = 0", "total = total + loss", "the variable total", 0),
        ("class Log: total = 0\nlog = Log()", "log.total += loss", "the variable self.total", 0),
    ],
)
def test_what_keeps_graphs_is_named(
    before: str, after: str, holder: str, least: int, observed: Callable[..., list[Growth]]
) -> None:
    (growth,) = observed(before, after)
    assert growth.holder == holder
    assert growth.held_at is not None
    assert growth.held_at.source == after
    assert growth.size >= least
    line = messages.keeps_graphs(Script(target="train.py", cwd=""), growth)
    assert f"in {holder} ({growth.held_at.line}: {after[:60]})" in line
    assert ("than was measured" in line) == (growth.size > 0)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("before", "after", "batch"),
    [
        ("", "pass", "64"),
        ("kept = []", "kept.append(loss.item())", "64"),
        ("kept = []", "kept.append(loss.detach())", "64"),
        ("total = 0", "total += loss.detach()", "64"),
        ("older = last = None", "older, last = last, loss", "64"),
        ("kept = []", "kept.append(loss.item())", "16 * (1 + step)"),
        ("first = None", "first = loss if first is None else first", "64"),
        ("class Cycle: pass", "cycle = Cycle(); cycle.own, cycle.loss = cycle, loss", "64"),
        ("", "with torch.no_grad(): model(x)", "64"),
    ],
)
def test_nothing_is_said_of_a_script_that_frees_its_graphs(
    before: str, after: str, batch: str, observed: Callable[..., list[Growth]]
) -> None:
    assert observed(before, after, batch=batch) == []


@pytest.mark.full
def test_a_search_says_it_once(
    command: Callable[..., subprocess.CompletedProcess[str]], tiny: str, tmp_path: Path
) -> None:
    leaks = tiny.replace(LOOP, f"kept = []\n{LOOP}").replace(NUMBER, "kept.append(model(x).sum())")
    (tmp_path / "train.py").write_text(leaks)
    done = command("search", "train.py", "--memory", "1GiB", "--trials", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = [each for each in done.stdout.splitlines() if "keeps the graph of each step" in each]
    assert len(said) == 1
    assert "in the list kept (train.py:" in said[0]
