"""The bandwidth between ranks: measured by one search, and read from the store by the next."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from autofit.facts import Bandwidth
from autofit.plan import Plan
from autofit.storage import MachineKey, Store, TrialRecord
from autofit.strategies import Fidelity
from autofit.tuning.proposals import Proposer
from autofit.worker.meter import build
from autofit.worker.records.trials import Verdict
from tests.tuning.simulated import GIB, H200, opened

FAST = Bandwidth(all_reduce=300e9, all_gather=200e9, reduce_scatter=100e9)
TRAIN = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 512), nn.Tanh(), nn.Linear(512, 1))
optimizer = torch.optim.Adam(model.parameters())
for step in range(60):
    x = torch.randn(512, 32)
    loss = nn.functional.mse_loss(model(x), x.mean(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.quick
def test_it_is_known_to_every_search_of_such_a_machine(tmp_path: Path) -> None:
    with Store(f"sqlite:///{tmp_path / 'autofit.db'}") as store:
        first = opened(store, tmp_path, Fidelity.ROUNDING, 24 * GIB, link="nvlink")
        proposer = Proposer(first, H200, spread=2)
        before = proposer.known()
        first.learn_bandwidth(2, FAST)
        assert proposer.known() != before, "plans are chosen again"
        other = opened(store, tmp_path, Fidelity.EXACT, 24 * GIB, link="nvlink")
        assert other.bandwidths == {2: FAST}
        assert opened(store, tmp_path, Fidelity.REDRAW, 24 * GIB, link="pcie").bandwidths == {}


@pytest.mark.full
@pytest.mark.skipif(build.shim() is None, reason="the shim needs Linux and a C compiler")
def test_a_search_measures_it_once(
    tmp_path: Path,
    command: Callable[..., subprocess.CompletedProcess[str]],
    trials: Callable[..., tuple[TrialRecord, ...]],
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    options = ("--gpus", "2", "--device", "cpu", "--memory", "256MiB", "--only", "ranks")
    done = command("search", "train.py", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    spread = [trial for trial in trials(tmp_path) if trial.plan == Plan.of({"ranks": "2"})]
    assert spread[0].verdict is Verdict.MEASURED, spread[0]
    with Store(str(tmp_path / "autofit.db")) as store:
        (study,) = store.studies()
        machine = MachineKey.of(study.hardware, study.versions)
        found = store.bandwidths(machine)
        assert set(found) == {2}
        assert 1e6 < found[2].all_reduce < 1e12
        store.set_bandwidth(machine, 2, FAST)

    again = command("search", "train.py", *options, "--fresh", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    with Store(str(tmp_path / "autofit.db")) as store:
        assert store.bandwidths(machine) == {2: FAST}, "not measured again"
