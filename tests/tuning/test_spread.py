"""Spreading a training over cards: what a search proposes for it, and a search that does it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from autofit.analysis.verdicts import best_plan
from autofit.plan import Plan
from autofit.storage import Purpose, Store, TrialRecord
from autofit.strategies import AS_IS, AUTO, Facts, Fidelity, RootFacts
from autofit.strategies.checkpointing import Checkpointing
from autofit.strategies.ranks import count
from autofit.worker.meter import build
from autofit.worker.records.trials import Measurement, OutOfMemory, TrialReport, Verdict
from tests.tuning.simulated import GIB, OOM, opened, searched

BATCH = 16
ROOT = RootFacts(
    name="Decoder",
    parameters=1_100_000_000,
    parameter_bytes=4_400_000_000,
    trainable=1_100_000_000,
    dtype="float32",
    batch=BATCH,
    blocks=22,
)
FACTS = Facts(roots=(ROOT,), optimizers=("AdamW",), stepped=True)


@dataclass(frozen=True)
class Decoder:
    """A decoder of 1.1 B parameters on H200s, with figures measured there as far as known."""

    budget: int
    bandwidth: float = 80e9
    """Bytes a second."""

    def peak(self, plan: Plan, size: int, blocks: str) -> float:
        """Return the GiB on a card."""
        cards = count(plan["ranks"])
        shard = {"zero1": (1.0, 1 / cards), "full": (1 / cards, 1 / cards)}
        shared, state = shard.get(plan["sharding"], (1.0, 1.0))
        state *= 0.27 if plan["optimizer"] == "eight_bit" else 1.0
        each = 1.6 if plan["precision"] == "bf16" else 2.6
        each *= 1 - 0.85 * Checkpointing().extent(blocks, FACTS)
        kept = {"half": 0.6, "all": 0.2}.get(plan["activation_offload"], 1.0)
        return 0.8 + 1.06 * (4.1 * 2 * shared + 8.2 * state + each * kept * size)

    def seconds(self, plan: Plan, size: int, blocks: str) -> float:
        """Return the seconds of a step."""
        cards = count(plan["ranks"])
        compute = {"bf16": 0.6, "tf32": 1.2}.get(plan["precision"], 3.6)
        compute *= 1 + 0.3 * Checkpointing().extent(blocks, FACTS)
        compute *= 0.9 if plan["compile"] != AS_IS else 1.0
        compute *= {"half": 1.5, "all": 2.1}.get(plan["activation_offload"], 1.0)
        chunks = math.ceil(BATCH / cards / size)
        step = {"fused": 0.02, "eight_bit": 0.07}.get(plan["optimizer"], 0.05)
        sent = 2 * (cards - 1) / cards * 4.4e9 / self.bandwidth
        extra = {"zero1": 0.01, "full": 0.18}.get(plan["sharding"], 0.0)
        return max(compute / cards, 0.03 * chunks) + 0.1 * (chunks > 1) + step + sent + extra

    def launched(self, plan: Plan, facts: Facts, index: int) -> tuple[TrialReport, Facts]:
        """Return what a trial says, and what is known of the script after it."""
        whole = math.ceil(BATCH / count(plan["ranks"]))
        sizes = [n for n in (1, 2, 4, 8, 16) if n <= whole]
        if plan["micro_batch"] != AUTO:
            sizes = [whole if plan["micro_batch"] == AS_IS else int(plan["micro_batch"])]
        levels = ["all", AS_IS] if plan["checkpointing"] == AUTO else [plan["checkpointing"]]
        found: list[Measurement] = []
        for size in sizes:
            for level in levels:
                peak = int(self.peak(plan, size, level) * GIB)
                if peak > self.budget:
                    continue
                one = self.seconds(plan, size, level)
                found.append(
                    Measurement(
                        micro_batch=size if size < whole else BATCH,
                        effective_batch=BATCH,
                        step_seconds=(one, 1.004 * one, 0.997 * one, one, 1.002 * one),
                        peak_allocated=peak,
                        peak_reserved=peak,
                        peak_device=peak,
                        compile_seconds=10.0 if plan["compile"] != AS_IS else 0.0,
                        checkpointing=level,
                    )
                )
        if not found:
            short = OutOfMemory(phase="forward", message="no memory", micro_batch=sizes[0])
            return TrialReport(index=index, plan=plan, verdict=OOM, out_of_memory=short), FACTS
        found.sort(key=lambda each: each.seconds, reverse=True)
        report = TrialReport(
            index=index,
            plan=plan,
            verdict=Verdict.MEASURED,
            best=found[-1].plan(plan).whole(FACTS),
            measurements=tuple(found),
            startup_seconds=0.0 if index else 12.0 + 6 * (plan["ranks"] != AS_IS),
        )
        return report, FACTS


def find(folder: Path, model: Decoder, cards: int, link: str = "nvlink") -> list[TrialRecord]:
    """Return the finished trials of a search with ``cards`` cards."""
    with Store(f"sqlite:///{folder / 'autofit.db'}") as store:
        history = opened(store, folder, Fidelity.ROUNDING, model.budget, link=link)
        searched(history, model, spread=cards)
        return list(history.now.finished)


@pytest.mark.quick
@pytest.mark.parametrize("cards", [2, 4])
def test_what_is_found_on_one_card_is_spread_over_several(tmp_path: Path, cards: int) -> None:
    """Few trials are enough, because the effects of levels are known by then."""
    found = find(tmp_path, Decoder(24 * GIB), cards)
    alone = [trial for trial in found if trial.plan["ranks"] == AS_IS]
    spread = found[len(alone) :]
    assert found[: len(alone)] == alone
    assert {trial.plan["ranks"] for trial in spread} == {str(cards)}
    assert len(spread) <= 10
    assert len({trial.launch for trial in spread}) <= 2
    before, after = (max(map(speed, trials)) for trials in (alone, spread))
    assert after > (1 + 0.4 * (cards - 1)) * before


@pytest.mark.full
@pytest.mark.parametrize("budget", [24, 20])
def test_a_search_starts_from_an_earlier_study_of_the_model(tmp_path: Path, budget: int) -> None:
    """The script was edited, or the budget is another one."""
    lines: list[str] = []
    trials = {}
    with Store(f"sqlite:///{tmp_path / 'autofit.db'}") as store:
        for learns in (False, True):
            first = opened(store, tmp_path, Fidelity.ROUNDING, 24 * GIB)
            if not learns:
                searched(first, Decoder(24 * GIB))
            edited = tmp_path / f"edited{learns}"
            edited.mkdir()
            again = opened(store, edited, Fidelity.ROUNDING, budget * GIB)
            again.tell = lambda notice: lines.append(getattr(notice, "text", ""))
            searched(again, Decoder(budget * GIB), learns=learns)
            trials[learns] = list(again.now.finished)
            if not learns:
                store.delete_study(again.study)
    (line,) = (line for line in lines if "has searched the same model" in line)
    best = max(map(speed, trials[False]))
    needed = {
        learns: next(n for n, trial in enumerate(found) if speed(trial) >= 0.97 * best)
        for learns, found in trials.items()
    }
    assert needed[True] <= needed[False] <= 2, (needed, line)  # the expert's plans are as near


def speed(trial: TrialRecord) -> float:
    return trial.measurement.samples_per_second if trial.measurement else 0.0


@pytest.mark.quick
def test_a_slow_link_is_found_out_at_once(tmp_path: Path) -> None:
    """The second card gains less than the gradients cost: one launch tells."""
    found = find(tmp_path, Decoder(130 * GIB, bandwidth=6e9), 2, "pcie")
    spread = [trial for trial in found if trial.plan["ranks"] == "2"]
    assert 1 <= len(spread) <= 3
    assert max(found, key=speed).plan["ranks"] == AS_IS


@pytest.mark.quick
def test_what_fits_no_card_may_fit_several(tmp_path: Path) -> None:
    """Nothing fits within 9 GiB without another training; a quarter of all of it does."""
    found = find(tmp_path, Decoder(9 * GIB), 4)
    fitting = [trial for trial in found if trial.verdict is Verdict.MEASURED]
    assert {trial.plan["ranks"] for trial in fitting} == {"4"}
    assert {trial.plan["sharding"] for trial in fitting} == {"full"}


WIDE = """\
import torch
from torch import nn

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 512)
        self.down = nn.Linear(512, 32)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(60):
    x = torch.randn(512, 32)
    loss = nn.functional.mse_loss(model(x), x.mean(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.6f}")
torch.save(model.state_dict(), "model.pt")
"""
"""A script of one process whose steps do enough for two."""


@pytest.mark.full
@pytest.mark.skipif(build.shim() is None, reason="the shim needs Linux and a C compiler")
def test_a_search_on_two_processes(
    tmp_path: Path,
    command: Callable[..., subprocess.CompletedProcess[str]],
    trials: Callable[..., tuple[TrialRecord, ...]],
) -> None:
    """Plans are found in one process, then in two; ``run`` starts what won."""
    (tmp_path / "train.py").write_text(WIDE)
    options = (
        "--gpus",
        "2",
        "--device",
        "cpu",
        "--memory",
        "256MiB",
        "--allow",
        "exact",
        "--trials",
        "8",
    )
    done = command("search", "train.py", *options, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found, finished = json.loads(done.stdout), trials(tmp_path)
    searched = [trial for trial in finished if trial.purpose is Purpose.SEARCH]
    counts = [trial.plan["ranks"] for trial in searched]
    alone = counts.count(AS_IS)
    assert counts == [AS_IS] * alone + ["2"] * (len(counts) - alone)
    assert 1 <= alone < len(counts)
    assert {trial.verdict for trial in searched[alone:]} == {Verdict.MEASURED}, searched
    assert all(
        len(each.measurement.rank_peaks) == 2 for each in searched[alone:] if each.measurement
    )
    confirmed = [trial for trial in finished if trial.purpose is Purpose.CONFIRM]
    assert confirmed[0].plan["ranks"] == max(searched, key=speed).plan["ranks"]
    assert found["devices"] == count(found["plan"]["ranks"])

    # The same command again has nothing to launch.
    again = command("search", "train.py", *options, "--json", cwd=tmp_path)
    assert json.loads(again.stdout)["launches"] == found["launches"]
    # One process is another study.
    one = command(
        "search", "train.py", *options, "--gpus-per-trial", "1", "--dry-run", cwd=tmp_path
    )
    assert "ranks" not in one.stdout

    # The training under two ranks is that of the script.
    plain = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True
    )
    spread = best_plan(searched[alone]).levels
    (tmp_path / "plan.json").write_text(json.dumps({"plan": spread}))
    ran = command("run", "train.py", "--plan", "plan.json", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    last = [float(text.split()[-1]) for text in (plain.stdout, ran.stdout)]
    assert last[0] == pytest.approx(last[1], rel=1e-3)
