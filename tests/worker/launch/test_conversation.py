"""A launch that asks for its next plan: what it is told, what becomes of it, what it measures."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from autofit.plan import Plan
from autofit.worker.launch.launcher import HARNESS, Control, launch
from autofit.worker.records.trials import (
    STEPS,
    Answer,
    Asking,
    GoOn,
    LaunchEnded,
    LaunchEvent,
    LaunchRequest,
    Measurement,
    Proven,
    RoundEnded,
    Script,
    Traced,
    TrialReport,
    Verdict,
)

pytestmark = pytest.mark.quick

CHILD = """
import os, queue, sys, time
from multiprocessing.connection import Connection
from autofit.worker.launch import lifeline
from autofit.worker.records.trials import *

events = Connection(int(os.environ["AUTOFIT_EVENTS_FD"]), readable=False)
control = Connection(int(os.environ["AUTOFIT_CONTROL_FD"]), writable=False)
plan = control.recv().request.plans[0]
answers = queue.SimpleQueue()
lifeline.watch(control.fileno(), answers.put)

def ask():
    events.send(Asking())
    return answers.get().plan

def measure(index, plan):
    events.send(PlanStarted(index=index))
    events.send(PlanEnded(report=TrialReport(index=index, plan=plan, verdict=Verdict.MEASURED)))

measure(0, plan)
"""
SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 512)
        self.down = nn.Linear(512, 64)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(64, 1)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


model = Net()
optimizer = torch.optim.Adam(model.parameters())
while True:
    x = torch.randn(512, 64)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

PAIR = 'model({"x": x, "y": x})'
FILLS = """\
def forward(self, pair):
        for key in ("x", "y"):
            pair[key + "'"] = self.encode(pair[key])
        return pair["x'"] + pair["y'"]

    def encode(self, x):
        for"""
"""Puts what it computes into its arguments, in place."""

NEUTRAL, HALF = Plan(), Plan.of({"precision": "bf16"})
ALL = Plan.of({"checkpointing": "all"})

Talk = Callable[..., list[LaunchEvent]]


@pytest.fixture
def talk(tmp_path: Path) -> Talk:
    """Run a launch of the neutral plan, and answer it with these plans, then with none."""

    def talk(
        body: str,
        *plans: Plan,
        first: Plan = NEUTRAL,
        harness: Path | None = None,
        timeout: float = 30.0,
        thinking: float = 0.0,
        budget: int = 1 << 30,
        waits: bool = False,
        proven: Sequence[Proven] = (),
        goes_on: Callable[[RoundEnded], GoOn] = lambda ended: GoOn(more=False),
    ) -> list[LaunchEvent]:
        if harness is None:
            harness = tmp_path / "harness.py"
            harness.write_text(CHILD + textwrap.dedent(body))
        request = LaunchRequest(
            script=Script(target="train.py", cwd=str(tmp_path)),
            plans=(first,),
            device="cpu",
            budget=budget,
            timeout=timeout,
            converses=True,
            waits=waits,
        )
        control, left, heard = Control(), list(plans), []
        for event in launch(request, harness=harness, control=control):
            heard.append(event)
            if isinstance(event, RoundEnded):
                control.answer(goes_on(event))
            elif isinstance(event, Asking):
                time.sleep(thinking)
                plan = left.pop(0) if left else None
                control.answer(Answer(plan=plan, timeout=timeout, proven=tuple(proven)))
        control.answer(Answer(plan=NEUTRAL, timeout=timeout))  # too late: it is heard by nobody
        return heard

    return talk


def reports(heard: Sequence[LaunchEvent]) -> list[tuple[int, Plan, Verdict]]:
    found = [event for event in heard if isinstance(event, TrialReport)]
    return [(report.index, report.plan, report.verdict) for report in found]


FIRST = (0, NEUTRAL, Verdict.MEASURED)


def test_it_asks_until_there_is_none(talk: Talk) -> None:
    heard = talk(
        """
        for index in (1, 2):
            measure(index, ask())
        assert ask() is None
        events.send(Finished(steps=7, stopped=True))
        """,
        HALF,
        ALL,
    )
    assert reports(heard) == [FIRST, (1, HALF, Verdict.MEASURED), (2, ALL, Verdict.MEASURED)]
    assert sum(isinstance(event, Asking) for event in heard) == 3
    assert isinstance(heard[-1], LaunchEnded)
    assert heard[-1].stopped


def test_what_dies_with_a_plan_it_has_not_begun_says_nothing_of_it(talk: Talk) -> None:
    heard = talk("ask()\nos.kill(os.getpid(), 9)", HALF)
    assert reports(heard) == [FIRST]
    assert isinstance(heard[-1], LaunchEnded)


def test_what_dies_under_a_plan_it_asked_for_fails_it(talk: Talk) -> None:
    heard = talk("ask()\nevents.send(PlanStarted(index=1))\nos.abort()", HALF)
    assert reports(heard) == [FIRST, (1, HALF, Verdict.PLAN_FAILED)]


def test_each_plan_has_its_own_time_and_waiting_for_it_takes_none(talk: Talk) -> None:
    body = "events.send(PlanStarted(index=1)) if ask() else None\ntime.sleep(60)"
    heard = talk(body, HALF, timeout=1.5, thinking=2.0)
    assert reports(heard) == [FIRST, (1, HALF, Verdict.TIMED_OUT)]


def test_after_a_refusal_at_the_first_call_the_next_plan_comes_first(
    talk: Talk, tmp_path: Path
) -> None:
    """It is traced, as what comes first is; what comes after one that has run is not."""
    (tmp_path / "train.py").write_text(
        SCRIPT.replace("Block() for _ in range(4)", "[nn.Identity(), nn.Tanh()]")
    )
    heard = talk("", NEUTRAL, HALF, first=ALL, harness=HARNESS)
    verdicts = [verdict for *_, verdict in reports(heard)]
    assert verdicts == [Verdict.REFUSED, Verdict.MEASURED, Verdict.MEASURED]
    assert [event.fresh for event in heard if isinstance(event, Asking)] == [True, False, False]
    assert [event.index for event in heard if isinstance(event, Traced)] == [1]


def test_started_ahead_it_asks_for_its_first_plan_too(talk: Talk, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    heard = talk("", ALL, harness=HARNESS, waits=True)
    asked = [event.fresh for event in heard if isinstance(event, Asking)]
    assert asked == [True, False]
    assert reports(heard) == [(0, ALL, Verdict.MEASURED)]
    assert [type(event) for event in talk("", harness=HARNESS, waits=True)][-2:] == [
        Asking,
        LaunchEnded,
    ]


def test_with_a_plan_it_is_told_what_others_have_proven(talk: Talk, tmp_path: Path) -> None:
    """How the batch is split it has seen by then."""
    (tmp_path / "train.py").write_text(SCRIPT)

    def proofs(*proven: Proven) -> list[Proven]:
        heard = talk("", ALL, harness=HARNESS, waits=True, proven=proven)
        assert reports(heard) == [(0, ALL, Verdict.MEASURED)]
        asked = next(at for at, event in enumerate(heard) if isinstance(event, Asking))
        return [event for event in heard[asked:] if isinstance(event, Proven)]

    others = proofs()
    assert others
    assert not proofs(*others)


def test_where_memory_runs_out_in_a_forward_the_call_is_made_again_under_the_next_plan(
    talk: Talk, tmp_path: Path
) -> None:
    """Of a forward that failed nothing was handed out: the process need not start anew."""
    many = SCRIPT.replace("range(4)", "range(16)").replace("randn(512", "randn(2048")
    (tmp_path / "train.py").write_text(many)
    heard = talk("", ALL, harness=HARNESS, budget=50 << 20)  # a block keeps 5 MiB, as it is
    assert reports(heard) == [(0, NEUTRAL, Verdict.OUT_OF_MEMORY), (1, ALL, Verdict.MEASURED)]
    assert [event.fresh for event in heard if isinstance(event, Asking)] == [True, False]
    assert [event.index for event in heard if isinstance(event, Traced)] == [1]


def test_a_refused_plan_leaves_nothing_in_memory(talk: Talk, tmp_path: Path) -> None:
    """Neither the call that ran out before it, nor what the model put into its arguments."""
    many = SCRIPT.replace("range(4)", "range(16)").replace("randn(512", "randn(1024")
    paired = many.replace("def forward(self, x):\n        for", FILLS).replace("model(x)", PAIR)
    (tmp_path / "train.py").write_text(paired)
    split = ALL.replace(micro_batch="auto")
    heard = talk("", split, ALL, harness=HARNESS, budget=70 << 20)  # as it is: twice 40 MiB
    found = [Verdict.OUT_OF_MEMORY, Verdict.REFUSED, Verdict.MEASURED]
    assert [verdict for *_, verdict in reports(heard)] == found
    alone = talk("", first=ALL, harness=HARNESS)
    assert figures(heard)[0].peak_device == pytest.approx(figures(alone)[0].peak_device, rel=0.02)


def test_parts_that_do_not_fit_give_way_within_the_call(talk: Talk, tmp_path: Path) -> None:
    """Completing the step in smaller ones would cost a step of which nothing is used."""
    many = SCRIPT.replace("range(4)", "range(16)").replace("randn(512", "randn(4096")
    (tmp_path / "train.py").write_text(many)
    large, small = (Plan.of({"micro_batch": size}) for size in ("2048", "128"))
    heard = talk("", small, first=large, harness=HARNESS, budget=50 << 20)
    found = [(0, large, Verdict.OUT_OF_MEMORY), (1, small, Verdict.MEASURED)]
    assert reports(heard) == found
    assert [event.index for event in heard if isinstance(event, Traced)] == [1]


@pytest.mark.full
def test_a_plan_measures_the_same_after_others_as_alone(talk: Talk, tmp_path: Path) -> None:
    """The peaks to a thousandth; times within the noise of a machine that others use."""
    (tmp_path / "train.py").write_text(SCRIPT)
    together = talk("", ALL, NEUTRAL.replace(checkpointing="half"), first=HALF, harness=HARNESS)
    alone = talk("", first=ALL, harness=HARNESS)
    assert [verdict for *_, verdict in reports(together)] == [Verdict.MEASURED] * 3, together
    after, first = figures(together)[1], figures(alone)[0]
    assert after.peak_allocated == pytest.approx(first.peak_allocated, rel=0.001)
    assert after.peak_device == pytest.approx(first.peak_device, rel=0.001)
    assert min(after.step_seconds) == pytest.approx(min(first.step_seconds), rel=0.5)


@pytest.mark.parametrize("searching", [True, False])
def test_a_plan_that_is_pruned_costs_no_further_windows(
    talk: Talk, tmp_path: Path, searching: bool
) -> None:
    """Its size search ends, and the plan has the speed that it showed."""
    (tmp_path / "train.py").write_text(SCRIPT)
    split = ALL.replace(micro_batch="auto")

    def goes_on(ended: RoundEnded) -> GoOn:
        search = ended.least_seconds is not None
        return GoOn(more=True, pruned=ended.index == 1 and search is searching)

    heard = talk("", split, harness=HARNESS, goes_on=goes_on)
    first, second = (event for event in heard if isinstance(event, TrialReport))
    assert (first.pruned, second.pruned) == (False, True)
    assert second.verdict is Verdict.MEASURED
    assert "slower" in second.reason
    last = [event for event in heard if isinstance(event, RoundEnded)][-1]
    if searching:
        (measured,) = (m for m in second.measurements if len(m.step_seconds) < STEPS)
        share = measured.micro_batch / measured.effective_batch
        assert last.least_seconds == pytest.approx(0.75 * share * min(measured.step_seconds))
    else:
        assert len(second.measurements) == 1
        assert len(last.steps) == STEPS


@pytest.mark.parametrize("more", [True, False])
def test_a_window_of_uneven_steps_goes_on_if_that_helps(
    talk: Talk, tmp_path: Path, more: bool
) -> None:
    uneven = "for wait in itertools.cycle((0.0, 0.05)):\n    time.sleep(wait)"
    script = "import itertools, time\n" + SCRIPT.replace("while True:", uneven)
    (tmp_path / "train.py").write_text(script)
    heard = talk("", harness=HARNESS, goes_on=lambda ended: GoOn(more=more))
    rounds = [event.steps for event in heard if isinstance(event, RoundEnded)]
    told = [step for steps in rounds for step in steps]
    (measured,) = figures(heard)
    assert tuple(seconds for _, seconds in told) == measured.step_seconds
    batches = [batch for batch, _ in told]
    assert batches == list(range(batches[0], batches[0] + len(told)))
    assert len(told) > STEPS if more else len(told) == STEPS


def figures(heard: Sequence[LaunchEvent]) -> list[Measurement]:
    found = [event.measurement for event in heard if isinstance(event, TrialReport)]
    return [each for each in found if each is not None]
