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
    Answer,
    Asking,
    LaunchEnded,
    LaunchEvent,
    LaunchRequest,
    Measured,
    Measurement,
    Proven,
    Script,
    Stage,
    Traced,
    TrialReport,
    Verdict,
    Verified,
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
    return answers.get().plans

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
WASTE = """\
class Waste(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        torch.empty(40 << 20, dtype=torch.int8)
        return gradient


"""
"""An operation whose backward needs 40 MiB for a moment."""

NEUTRAL, HALF = Plan(), Plan.of({"precision": "bf16"})
ALL = Plan.of({"checkpointing": "all"})

TRACED, OBSERVED = 3, 2
"""Steps of the script as it is."""
TURNS, TURN = 2, 3
"""Windows of a plan that trains in turn with others, and steps of each."""
Given = Plan | tuple[Stage, Sequence[Plan]]
"""A plan to probe, or what to do with which plans."""
Talk = Callable[..., list[LaunchEvent]]


@pytest.fixture
def talk(tmp_path: Path) -> Talk:
    """Run a launch of the neutral plan, and answer it with these, then with no plan."""

    def talk(
        body: str,
        *given: Given,
        first: Plan = NEUTRAL,
        harness: Path | None = None,
        timeout: float = 30.0,
        thinking: float = 0.0,
        budget: int = 1 << 30,
        waits: bool = False,
        proven: Sequence[Proven] = (),
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
        control, left, heard = Control(), list(given), []
        for event in launch(request, harness=harness, control=control):
            heard.append(event)
            if isinstance(event, Asking):
                time.sleep(thinking)
                now: Given = left.pop(0) if left else (Stage.PROBE, ())
                stage, plans = (Stage.PROBE, (now,)) if isinstance(now, Plan) else now
                control.answer(
                    Answer(plans=tuple(plans), stage=stage, timeout=timeout, proven=tuple(proven))
                )
        late = Answer(plans=(NEUTRAL,), timeout=timeout)
        control.answer(late)  # it is heard by nobody
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
            measure(index, *ask())
        assert ask() == ()
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


def test_after_a_refusal_at_the_first_call_the_next_plan_is_probed_there(
    talk: Talk, tmp_path: Path
) -> None:
    """A step under it is observed then, because none was as it is."""
    (tmp_path / "train.py").write_text(
        SCRIPT.replace("Block() for _ in range(4)", "[nn.Identity(), nn.Tanh()]")
    )
    heard = talk("", NEUTRAL, HALF, first=ALL, harness=HARNESS)
    verdicts = [verdict for *_, verdict in reports(heard)]
    assert verdicts == [Verdict.REFUSED, Verdict.MEASURED, Verdict.MEASURED]
    assert [event.fresh for event in heard if isinstance(event, Asking)] == [True, False, False]
    assert all(each.probed for each in figures(heard))
    assert isinstance(heard[-1], LaunchEnded)
    assert heard[-1].steps == 2, "the first is not timed"


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


def test_it_observes_the_script_as_it_is_and_then_probes(talk: Talk, tmp_path: Path) -> None:
    """Probes run in the next call; no step is taken meanwhile, and nothing is verified."""
    (tmp_path / "train.py").write_text(SCRIPT)
    split = Plan.of({"micro_batch": "128"})
    heard = talk("", ALL, split, harness=HARNESS)
    assert reports(heard) == [
        FIRST,
        (1, ALL, Verdict.MEASURED),
        (2, split, Verdict.MEASURED),
    ]
    observed, *probed = figures(heard)
    assert not observed.probed
    assert len(observed.step_seconds) == OBSERVED
    assert [(each.probed, len(each.step_seconds)) for each in probed] == [(True, 1)] * 2
    assert [each.micro_batch for each in (observed, *probed)] == [512, 512, 128]
    assert probed[1].peak_allocated < probed[0].peak_allocated < observed.peak_allocated
    assert [event.index for event in heard if isinstance(event, Traced)] == [0]
    assert not [event for event in heard if isinstance(event, Verified)]
    assert isinstance(heard[-1], LaunchEnded)
    assert heard[-1].steps == TRACED + OBSERVED


def test_plans_train_in_turn(talk: Talk, tmp_path: Path) -> None:
    """Each in as many windows, and reported at the end with all of its steps."""
    (tmp_path / "train.py").write_text(SCRIPT)
    heard = talk("", ALL, HALF, (Stage.STEPS, (ALL, HALF)), harness=HARNESS)
    *_, third, fourth = reports(heard)
    assert (third, fourth) == ((3, ALL, Verdict.MEASURED), (4, HALF, Verdict.MEASURED))
    turns = [event.index for event in heard if isinstance(event, Measured)][-2 * TURNS :]
    assert turns == [3, 4] * TURNS
    for each in figures(heard)[-2:]:
        assert (each.probed, len(each.step_seconds)) == (False, TURNS * TURN)
    assert not [event for event in heard if isinstance(event, Verified)]


def test_a_plan_of_a_turn_that_does_not_fit_leaves_the_others(talk: Talk, tmp_path: Path) -> None:
    many = SCRIPT.replace("range(4)", "range(16)").replace("randn(512", "randn(2048")
    (tmp_path / "train.py").write_text(many)
    given = (Stage.STEPS, (NEUTRAL, ALL))
    heard = talk("", ALL, given, harness=HARNESS, budget=80 << 20)
    assert reports(heard) == [
        (0, NEUTRAL, Verdict.OUT_OF_MEMORY),
        (1, ALL, Verdict.MEASURED),
        (2, NEUTRAL, Verdict.OUT_OF_MEMORY),
        (3, ALL, Verdict.MEASURED),
    ]


def test_real_steps_need_what_the_probe_said(talk: Talk, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    plans = (ALL, Plan.of({"micro_batch": "128"}))
    heard = talk("", *plans, (Stage.STEPS, plans), harness=HARNESS)
    _, *probed, one, other = figures(heard)
    for said, steps in zip(probed, (one, other), strict=True):
        assert said.peak_device == pytest.approx(steps.peak_device, rel=0.06)
        assert said.effective_batch == steps.effective_batch


def test_the_check_of_a_plan_comes_last(talk: Talk, tmp_path: Path) -> None:
    """Its report has what the steps before have shown; the check's own step does not count."""
    (tmp_path / "train.py").write_text(SCRIPT)
    given = ((Stage.STEPS, (ALL,)), (Stage.CHECK, (ALL,)))
    heard = talk("", ALL, *given, harness=HARNESS)
    assert reports(heard)[1:] == [(index, ALL, Verdict.MEASURED) for index in (1, 2, 3)]
    *_, steps, checked = figures(heard)
    assert checked == steps
    asked = [at for at, event in enumerate(heard) if isinstance(event, Asking)]
    found = [(at, event.plan) for at, event in enumerate(heard) if isinstance(event, Verified)]
    ((at, plan),) = found
    assert asked[2] < at < asked[3]
    assert plan == ALL


def test_what_the_check_refuses_is_refused(talk: Talk, tmp_path: Path) -> None:
    """A model whose loss depends on how the batch is split; a probe does not show that."""
    mixes = SCRIPT.replace("x = x + block(x)", "x = x + block(x) * x.mean()")
    (tmp_path / "train.py").write_text(mixes)
    split = Plan.of({"micro_batch": "128"})
    heard = talk("", split, (Stage.CHECK, (split,)), ALL, harness=HARNESS)
    verdicts = [verdict for *_, verdict in reports(heard)]
    assert verdicts == [Verdict.MEASURED, Verdict.MEASURED, Verdict.REFUSED, Verdict.MEASURED]
    refused = [event for event in heard if isinstance(event, TrialReport)][2]
    assert refused.blamed == "micro_batch"


def test_with_a_plan_it_is_told_what_others_have_proven(talk: Talk, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    check = (Stage.CHECK, (ALL,))

    def proofs(*proven: Proven) -> list[Proven]:
        heard = talk("", ALL, check, harness=HARNESS, waits=True, proven=proven)
        assert [verdict for *_, verdict in reports(heard)] == [Verdict.MEASURED] * 2
        asked = next(at for at, event in enumerate(heard) if isinstance(event, Asking))
        return [event for event in heard[asked:] if isinstance(event, Proven)]

    others = proofs()
    assert others
    assert not proofs(*others)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_script_that_does_not_fit_as_it_is_is_probed_all_the_same(
    talk: Talk, tmp_path: Path, where: str
) -> None:
    """The process need not start anew: nothing that follows is kept."""
    many = SCRIPT.replace("range(4)", "range(16)").replace("randn(512", "randn(2048")
    budget = 50 << 20  # a block keeps 5 MiB, as it is
    if where == "backward":
        many = many.replace("class Block", WASTE + "class Block")
        many = many.replace("torch.tanh(self.up(x))", "Waste.apply(torch.tanh(self.up(x)))")
        budget = 110 << 20
    (tmp_path / "train.py").write_text(many)
    heard = talk("", ALL, harness=HARNESS, budget=budget)
    assert reports(heard) == [(0, NEUTRAL, Verdict.OUT_OF_MEMORY), (1, ALL, Verdict.MEASURED)]
    first = next(event for event in heard if isinstance(event, TrialReport))
    assert first.out_of_memory is not None
    assert first.out_of_memory.phase == where
    assert figures(heard)[0].probed
    fresh = [event.fresh for event in heard if isinstance(event, Asking)]
    assert fresh == [where == "forward", False]


def test_a_refused_plan_leaves_nothing_in_memory(talk: Talk, tmp_path: Path) -> None:
    """Neither the call that ran out before it, nor what the model put into its arguments."""
    many = SCRIPT.replace("range(4)", "range(16)").replace("randn(512", "randn(1024")
    paired = many.replace("def forward(self, x):\n        for", FILLS).replace("model(x)", PAIR)
    (tmp_path / "train.py").write_text(paired)
    missing = Plan.of({"attention": "flash"})
    heard = talk("", missing, ALL, harness=HARNESS, budget=70 << 20)  # as it is: twice 40 MiB
    found = [Verdict.OUT_OF_MEMORY, Verdict.REFUSED, Verdict.MEASURED]
    assert [verdict for *_, verdict in reports(heard)] == found
    alone = talk("", first=ALL, harness=HARNESS)
    assert figures(heard)[0].peak_device == pytest.approx(figures(alone)[0].peak_device, rel=0.02)


def test_parts_that_do_not_fit_give_way_within_the_call(talk: Talk, tmp_path: Path) -> None:
    many = SCRIPT.replace("range(4)", "range(16)").replace("randn(512", "randn(4096")
    (tmp_path / "train.py").write_text(many)
    large, small = (Plan.of({"micro_batch": size}) for size in ("2048", "128"))
    heard = talk("", small, first=large, harness=HARNESS, budget=50 << 20)
    found = [(0, large, Verdict.OUT_OF_MEMORY), (1, small, Verdict.MEASURED)]
    assert reports(heard) == found


def test_the_training_goes_on_as_if_nothing_was_probed(talk: Talk, tmp_path: Path) -> None:
    """Parameters, gradients and random numbers are. An optimizer's state need not be."""
    (tmp_path / "train.py").write_text(SCRIPT.replace("optim.Adam(", "optim.SGD(lr=1e-3, params="))
    steps = (Stage.STEPS, (NEUTRAL,))
    probed = talk("", ALL, HALF, Plan.of({"micro_batch": "128"}), steps, harness=HARNESS)
    plain = talk("", steps, harness=HARNESS)
    assert len(reports(probed)) == len(reports(plain)) + 3
    assert figures(probed)[-1].losses == figures(plain)[-1].losses


@pytest.mark.full
def test_a_plan_measures_the_same_after_others_as_alone(talk: Talk, tmp_path: Path) -> None:
    """The peaks to a thousandth; times within the noise of a machine that others use."""
    (tmp_path / "train.py").write_text(SCRIPT)
    steps = (Stage.STEPS, (ALL,))
    others = HALF, ALL, NEUTRAL.replace(checkpointing="1")
    together = talk("", *others, steps, harness=HARNESS)
    alone = talk("", steps, harness=HARNESS)
    assert [verdict for *_, verdict in reports(together)] == [Verdict.MEASURED] * 5, together
    after, first = figures(together)[-1], figures(alone)[-1]
    assert after.peak_allocated == pytest.approx(first.peak_allocated, rel=0.001)
    assert after.peak_device == pytest.approx(first.peak_device, rel=0.001)
    assert min(after.step_seconds) == pytest.approx(min(first.step_seconds), rel=0.5)


def figures(heard: Sequence[LaunchEvent]) -> list[Measurement]:
    found = [event.measurement for event in heard if isinstance(event, TrialReport)]
    return [each for each in found if each is not None]
