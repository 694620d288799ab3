"""Trials of a script that trains on two gloo ranks, and what becomes of them when one is amiss."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from autofit.plan import Plan
from autofit.worker.launch.launcher import launch
from autofit.worker.meter import build
from autofit.worker.records.trials import (
    LaunchEnded,
    LaunchEvent,
    LaunchRequest,
    Learned,
    Proven,
    Script,
    TrialReport,
    Verdict,
)

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(build.shim() is None, reason="the shim needs Linux and a C compiler"),
]

SPLIT = Plan.of({"micro_batch": "4"})
WHOLE = Plan()
CHECKPOINTED = Plan.of({"checkpointing": "all"})

Train = Callable[..., list[LaunchEvent]]


@pytest.fixture
def train(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Run a trial on two ranks; nothing of it is left, neither processes nor files."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    own = str(root / "tests" / "harness" / "session" / "training_ranks.py")

    def run(
        *plans: Plan,
        amiss: str = "",
        timeout: float = 120,
        wrap: str = "ddp",
        steps: int = 100,
        script: str = "",
        budget: int = 256 << 20,
    ) -> object:
        target = str(root / "tests" / "scripts" / script) if script else own
        args = () if script else ("--amiss", amiss, "--wrap", wrap, "--steps", str(steps))
        request = LaunchRequest(
            script=Script(target=target, args=args, cwd=str(tmp_path)),
            plans=plans,
            device="cpu",
            budget=budget,
            timeout=timeout,
            ranks=2,
        )
        heard = list(launch(request))
        left = [each for each in psutil.Process().children(recursive=True) if _trains(each)]
        assert not left
        assert not list(tmp_path.iterdir())
        return heard

    return run  # type: ignore[return-value]


def _trains(process: psutil.Process) -> bool:
    try:
        return sys.executable in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def reports(heard: list[LaunchEvent]) -> list[TrialReport]:
    return [event for event in heard if isinstance(event, TrialReport)]


def seconds(heard: list[LaunchEvent]) -> float:
    assert isinstance(heard[-1], LaunchEnded)
    return heard[-1].seconds


def test_plan_after_plan_on_two_ranks(train: Train) -> None:
    heard = train(WHOLE, SPLIT, Plan.of({"checkpointing": "all", "micro_batch": "4"}))
    facts = [event.facts for event in heard if isinstance(event, Learned)][-1]
    assert facts.world_size == 2
    assert (facts.batch, facts.effective_batch) == (16, 32)
    found = [report.measurement for report in reports(heard)]
    assert [each is not None and each.effective_batch for each in found] == [32, 32, 32]
    peaks = [each.peak_device for each in found if each is not None]
    assert peaks == sorted(peaks, reverse=True)
    assert all(each is not None and len(each.rank_peaks) == 2 for each in found)


@pytest.mark.parametrize("script", ["hf_trainer.py", "accelerate_prepare.py", "ddp.py"])
def test_frameworks_as_they_are(train: Train, script: str) -> None:
    (report, *_) = reports(train(WHOLE, SPLIT, script=script))
    assert report.verdict is Verdict.MEASURED, report
    assert report.measurement is not None
    assert report.measurement.effective_batch == 32


def test_the_larger_peak_counts(train: Train) -> None:
    (report,) = reports(train(WHOLE, amiss="larger"))
    assert report.measurement is not None
    first, second = report.measurement.rank_peaks
    assert second - first == pytest.approx(8 << 20, rel=0.1)
    assert report.measurement.peak_device == second


def test_one_rank_runs_out_of_memory_in_backward(train: Train) -> None:
    heard = train(WHOLE, amiss="hungry")
    (report,) = reports(heard)
    assert report.verdict is Verdict.OUT_OF_MEMORY
    assert report.out_of_memory is not None
    assert report.out_of_memory.phase == "backward"
    assert report.out_of_memory.requested == 1 << 30
    assert report.reason.startswith("rank 1: ")
    assert seconds(heard) < 60


def test_a_bug_on_one_rank_is_shown_as_python_shows_it(train: Train) -> None:
    (report,) = reports(train(WHOLE, amiss="bug"))
    assert report.verdict is Verdict.SCRIPT_FAILED
    assert report.reason == "rank 1: ValueError: a bug of rank 1 alone"
    assert report.traceback.splitlines()[-1] == "ValueError: a bug of rank 1 alone"
    assert "autofit" not in report.traceback


def test_a_rank_is_killed(train: Train) -> None:
    heard = train(WHOLE, amiss="kill")
    (report,) = reports(heard)
    assert report.verdict is Verdict.SCRIPT_FAILED
    assert report.reason == "rank 1: killed by signal 9 (SIGKILL)"
    assert seconds(heard) < 60


def test_a_rank_leaves_the_others_behind(train: Train) -> None:
    heard = train(WHOLE, amiss="exit")
    (report,) = reports(heard)
    assert report.verdict is Verdict.SCRIPT_FAILED
    assert report.reason.startswith("rank 0: after rank 1 had ended: ")
    assert seconds(heard) < 60


def test_a_script_that_ends_by_itself_is_measured_as_far_as_it_came(train: Train) -> None:
    (report,) = reports(train(WHOLE, steps=6))
    assert report.verdict is Verdict.MEASURED, report
    assert report.measurement is not None
    assert len(report.measurement.rank_peaks) == 2


def test_a_rank_hangs(train: Train) -> None:
    (report,) = reports(train(WHOLE, amiss="hang", timeout=40))
    assert report.verdict is Verdict.TIMED_OUT
    assert report.reason.startswith("not done within 40 s")


def test_what_one_rank_refuses_all_refuse_and_the_launch_goes_on(train: Train) -> None:
    refused, measured = reports(train(SPLIT, CHECKPOINTED, amiss="mixing"))
    assert (refused.verdict, refused.blamed) == (Verdict.REFUSED, "micro_batch")
    assert measured.verdict is Verdict.MEASURED


def test_a_rank_that_evaluates_alone_keeps_step(train: Train) -> None:
    found = reports(train(WHOLE, SPLIT, amiss="evaluates"))
    assert [report.verdict for report in found] == [Verdict.MEASURED] * 2


def test_ranks_find_the_files_of_one_another(train: Train) -> None:
    (report,) = reports(train(WHOLE, amiss="files"))
    assert report.verdict is Verdict.MEASURED, report


def test_ranks_that_train_by_themselves(train: Train) -> None:
    (report,) = reports(train(WHOLE, amiss="alone"))
    assert report.verdict is Verdict.SCRIPT_FAILED
    assert "does not set up torch.distributed" in report.reason


def test_sharded_weights(train: Train) -> None:
    """Under fully_shard the batch is not split; what else a plan does is proven on the shards."""
    plans = (WHOLE, SPLIT, CHECKPOINTED, Plan.of({"optimizer": "fused"}))
    heard = train(*plans, wrap="fsdp2")
    (root,) = [event.facts for event in heard if isinstance(event, Learned)][-1].roots
    head, rest = 16 + 1, 4 * (256 * 16 + 256 + 16 * 256 + 16)  # what has one row is not cut
    assert root.parameters == head + rest
    assert root.trainable == head + rest // 2
    assert root.parameter_bytes == 8 * root.trainable, "what one rank holds"
    whole, split, checkpointed, fused = reports(heard)
    assert split.verdict is Verdict.REFUSED
    assert "not split under FSDP" in split.reason
    assert [each.verdict for each in (whole, checkpointed, fused)] == [Verdict.MEASURED] * 3
    assert whole.measurement is not None
    assert checkpointed.measurement is not None
    assert checkpointed.measurement.peak_device < whole.measurement.peak_device
    assert checkpointed.gradient_difference is not None


def test_sharded_weights_where_the_script_does_not_fit_as_it_is(train: Train) -> None:
    """What proves a plan there does not run out in the middle of it: its ranks would be apart."""
    short = {"wrap": "fsdp2", "budget": 6 << 20}
    (whole,) = reports(train(WHOLE, **short))
    (checkpointed,) = reports(train(CHECKPOINTED, **short))
    assert whole.verdict is Verdict.OUT_OF_MEMORY
    assert checkpointed.verdict is Verdict.MEASURED, checkpointed.reason
    assert checkpointed.gradient_difference == 0.0


UNEVEN = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce

dist.init_process_group("gloo")
rank = dist.get_rank()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 33 - rank), nn.Linear(33 - rank, 64, bias=False)

    def forward(self, x):
        return x + all_reduce(self.down(torch.tanh(self.up(x))))


torch.manual_seed(0)
net = nn.Sequential(Block(), Block(), Block(), nn.Linear(64, 3))
optimizer = torch.optim.AdamW(net.parameters())
for step in range(60):
    nn.functional.cross_entropy(net(torch.randn(8, 64)), torch.arange(8) % 3).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
"""


def test_ranks_of_another_shape_are_told_what_is_theirs(tmp_path: Path) -> None:
    """Tensor parallel by hand: a rank that proves communicates, so all do, or none."""
    (tmp_path / "train.py").write_text(UNEVEN)
    told: tuple[Proven, ...] = ()
    for known in (False, True):
        request = LaunchRequest(
            script=Script(target="train.py", cwd=str(tmp_path)),
            plans=(Plan.of({"precision": "bf16"}),),
            device="cpu",
            budget=1 << 30,
            timeout=120,
            ranks=2,
            proven=told[:1] if known else (),
        )
        heard = list(launch(request))
        (report,) = reports(heard)
        assert report.verdict is Verdict.MEASURED, report
        told = tuple(event for event in heard if isinstance(event, Proven))
        missing = 1 if known else 2  # what one rank knows alone helps neither; both verify again
        assert len(told) == missing
