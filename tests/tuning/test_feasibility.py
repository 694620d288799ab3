"""A model whose weights, gradients and optimizer state fit under several levels together alone."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from autofit.analysis.feasibility import (
    STATIC_STRATEGIES,
    LevelSet,
    level_sets_needed,
    next_level_set,
)
from autofit.plan import Plan
from autofit.space.catalogue import space
from autofit.storage import State, Store, TrialRecord
from autofit.strategies import AS_IS, AUTO, Facts, Fidelity, RootFacts
from autofit.tuning.history import History
from autofit.worker.launch.launcher import Control, launch
from autofit.worker.records.trials import (
    LaunchRequest,
    Learned,
    Measurement,
    OutOfMemory,
    Script,
    TrialReport,
    Verdict,
)
from tests.tuning.simulated import GIB, H200, MIB, OOM, opened, searched

OTHER_TRAINING = ("adapters", "batch_size", "sequence_length")
"""What a full fine-tune does without."""
SEVEN = 6_738_415_616
MODEL = RootFacts(
    name="LlamaForCausalLM",
    parameters=SEVEN,
    parameter_bytes=4 * SEVEN,
    trainable=SEVEN,
    dtype="float32",
    called=False,
    blocks=32,
    classes=32_000,
    transformers=True,
    attention="sdpa",
)
"""As it is known after memory has run out in the making of it."""
CALLED = replace(MODEL, called=True, batch=16)


@dataclass(frozen=True)
class Llama:
    """A 7B model on an H200, with the figures of ``decoder-7b-24GiB.log`` as far as known."""

    budget: int
    clips: bool = False

    def peak(self, plan: Plan, size: int) -> float:
        """Return the bytes on the device."""
        weights, gradients = 4.0 * SEVEN, 4.0 * SEVEN
        state = 8.0 * SEVEN * {"eight_bit": 0.26, "lion": 0.5}.get(plan["optimizer"], 1.0)
        if plan["weights"] != AS_IS:
            weights, gradients = weights / 2, gradients / 2
            state /= 2 if plan["weights"] == "bf16" else 1
        if plan["gradient_release"] == "hosted" or (
            plan["gradient_release"] == "released" and size == 16
        ):
            gradients = 0.8 * GIB
        if plan["optimizer_offload"] == "streamed":
            state = 0.9 * GIB
        pieces = 1.5 * GIB * (plan["weights"] == "bf16_master")
        blocks = 17.0 if plan["checkpointing"] == AS_IS else 1.1
        logits = 0.1 if plan["loss"] == "chunked" else 0.7
        return 0.8 * GIB + 1.04 * (
            weights + gradients + state + pieces + size * (blocks + logits) * GIB
        )

    def seconds(self, plan: Plan, size: int) -> float:
        """Return the time of a step."""
        compute = 4.1 if plan["checkpointing"] == AS_IS else 5.3
        compute *= 1.0 if plan["weights"] != AS_IS or plan["precision"] == "bf16" else 8.0
        compute *= 0.93 if plan["compile"] != AS_IS else 1.0
        moved = 1.3 * (plan["optimizer_offload"] == "streamed")
        moved += 0.25 * (plan["gradient_release"] == "hosted") * math.ceil(16 / size)
        return compute + moved + 1.6 * (plan["weights"] == "bf16_master")

    def launched(self, plan: Plan, facts: Facts, index: int) -> tuple[TrialReport, Facts]:
        """Return what a trial says, and what is known of the script after it."""

        def short(phase: str, size: int | None = None) -> TrialReport:
            error = OutOfMemory(phase=phase, message="no memory", requested=GIB, micro_batch=size)
            return TrialReport(
                index=index, plan=plan, verdict=Verdict.OUT_OF_MEMORY, out_of_memory=error
            )

        made = (2 if plan["weights"] != AS_IS else 4) * SEVEN
        if made > self.budget:
            return short("outside the model"), facts if facts.roots else Facts(roots=(MODEL,))
        begun = Facts(roots=(CALLED,), optimizers=("AdamW",))
        stepped = replace(begun, stepped=True, gradients_read=self.clips)
        if self.clips and plan["gradient_release"] != AS_IS:
            report = TrialReport(
                index=index,
                plan=plan,
                verdict=Verdict.REFUSED,
                reason="the script clips",
                blamed="gradient_release",
            )
            return report, stepped
        sizes = [16] if plan["micro_batch"] == AS_IS else [1, 2, 4, 8, 16]
        levels = [AS_IS, "all"] if plan["checkpointing"] == AUTO else [plan["checkpointing"]]
        points = [plan.sized(size, level) for size in sizes for level in levels]
        measured = [
            Measurement(
                micro_batch=size,
                effective_batch=16,
                step_seconds=(self.seconds(point, size),) * 3,
                peak_allocated=int(self.peak(point, size)),
                peak_reserved=int(self.peak(point, size)),
                peak_device=int(self.peak(point, size)),
                checkpointing=point["checkpointing"],
            )
            for point in points
            for size in [16 if point["micro_batch"] == AS_IS else int(point["micro_batch"])]
            if self.peak(point, size) <= self.budget
        ]
        if not measured:
            return short("forward", 1), begun
        measured.sort(key=lambda each: (-each.seconds, each.micro_batch))
        report = TrialReport(
            index=index,
            plan=plan,
            verdict=Verdict.MEASURED,
            best=measured[-1].plan(plan),
            measurements=tuple(measured),
        )
        return report, stepped


@pytest.fixture
def history(tmp_path: Path) -> Iterator[Callable[[Fidelity, int], History]]:
    """A new study of such a script."""
    with Store(str(tmp_path / "autofit.db")) as store:
        yield lambda allow, budget: opened(store, tmp_path, allow, budget, *OTHER_TRAINING)


@pytest.mark.quick
@pytest.mark.parametrize("allow", [Fidelity.ROUNDING, Fidelity.RECIPE])
def test_seven_billion_parameters_are_trained_in_full_within_24_gib(
    history: Callable[[Fidelity, int], History], allow: Fidelity
) -> None:
    found = history(allow, 24 * GIB)
    launches = searched(found, Llama(24 * GIB))
    assert launches <= 9  # 12, less those that confirm the winner
    best = found.now.ranked[0].plan
    assert best["weights"] == ("bf16" if allow is Fidelity.RECIPE else "bf16_master")
    assert best["gradient_release"] == "hosted"
    assert best["optimizer_offload"] == "streamed"
    assert best["adapters"] == AS_IS
    known = found.study.facts
    assert known is not None
    assert known.roots == (CALLED,)  # what the first launch could not tell has come since


@pytest.mark.quick
def test_a_set_that_comes_to_nothing_is_followed_by_one_with_more_room(
    history: Callable[[Fidelity, int], History],
) -> None:
    """Arithmetic lets masters fit within 18.5 GiB, and by a little they do not."""
    budget = 37 * GIB // 2
    found = history(Fidelity.RECIPE, budget)
    searched(found, Llama(budget))
    first = [(t.plan["weights"], t.verdict) for t in found.now.finished[:3]]
    assert first == [("as_is", OOM), ("bf16_master", OOM), ("bf16", Verdict.MEASURED)]


@pytest.mark.quick
def test_where_every_set_comes_to_nothing_the_search_ends_soon(
    history: Callable[[Fidelity, int], History],
) -> None:
    """A script that clips its gradients needs all of them at once."""
    found = history(Fidelity.ROUNDING, 24 * GIB)
    searched(found, Llama(24 * GIB, clips=True))
    assert [trial.verdict for trial in found.now.finished] == [OOM, Verdict.REFUSED]


@pytest.mark.quick
def test_sets_are_only_for_what_no_other_plan_holds() -> None:
    facts = Facts(roots=(CALLED,), optimizers=("AdamW",))
    for budget, needed in ((130, False), (60, True), (24, True), (10, False)):
        levels = space(H200, facts, allow=Fidelity.EXACT)
        found = level_sets_needed(levels, facts, budget * GIB, cuda=True)
        exact = budget == 60  # the weights fit, what follows from them does not
        assert bool(found) == (needed and exact)
        assert (found is None) == (budget == 130)
        rounding = space(H200, facts, allow=Fidelity.ROUNDING)
        assert bool(level_sets_needed(rounding, facts, budget * GIB, cuda=True)) == needed
    unknown = Facts(roots=(CALLED,), optimizers=("SGD",))  # which may keep nothing
    levels = space(H200, unknown, allow=Fidelity.EXACT)
    assert level_sets_needed(levels, unknown, 60 * GIB, cuda=True) is None


@pytest.mark.quick
def test_the_first_set_changes_the_training_least() -> None:
    facts = Facts(roots=(CALLED,), optimizers=("AdamW",))
    levels = space(H200, facts, allow=Fidelity.RECIPE)
    found = level_sets_needed(levels, facts, 24 * GIB, cuda=True)
    assert found is not None
    plans = [Plan.of(dict(each.levels)) for each in found]
    assert plans[0].fidelity(facts) is Fidelity.ROUNDING
    masters = {"optimizer": "fused", "weights": "bf16_master", "optimizer_offload": "streamed"}
    assert plans[0] == Plan.of({**masters, "gradient_release": "hosted", "micro_batch": AUTO})
    lean = next_level_set(found, levels, ())
    assert lean is not None
    plan = lean.leanest(levels)
    assert plan is not None
    assert plan["checkpointing"] == "auto", "as many blocks as it takes"
    assert LevelSet.of(plan).levels == lean.levels
    assert {*STATIC_STRATEGIES} == {name for name, _ in lean.levels} - {"micro_batch"}


# --- real ones --------------------------------------------------------------------------------

WIDE = """\
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, width, *, blocks):
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))

    def forward(self, x):
        return self.blocks(x)


model = Net(512, blocks=40)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(40):
    x = torch.randn(4, 512)
    loss = (model(x) - x.roll(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
WEIGHTS = 40 * 2 * (512 * 512 + 512) * 4
"""Bytes: 80 MiB. In the making of it there is nothing else."""


@pytest.mark.quick
@pytest.mark.parametrize("line", ["model = Net(512, blocks=40)", "model.double()"])
def test_what_a_model_is_that_does_not_fit_is_learned(line: str, tmp_path: Path) -> None:
    """From the class that was being made, or from the model that was being converted."""
    made = line.startswith("model =")
    (tmp_path / "train.py").write_text(
        WIDE if made else WIDE.replace("optimizer =", f"{line}\noptimizer =", 1)
    )
    request = LaunchRequest(
        script=Script(target="train.py", cwd=str(tmp_path)),
        plans=(Plan(),),
        device="cpu",
        budget=(50 if made else 110) * MIB,
        timeout=60,
    )
    events = list(launch(request))
    (report,) = (each for each in events if isinstance(each, TrialReport))
    assert report.verdict is Verdict.OUT_OF_MEMORY, report
    (learned,) = (each.facts for each in events if isinstance(each, Learned))
    (root,) = learned.roots
    assert not learned.called
    assert (root.name, root.blocks, root.batch) == ("Net", 40, None)
    assert root.parameters == WEIGHTS // 4
    assert root.parameter_bytes >= WEIGHTS


@pytest.mark.quick
@pytest.mark.parametrize("made", ["AdamW", "RMSprop"])
def test_the_optimizer_is_known_before_it_has_stepped(made: str, tmp_path: Path) -> None:
    """Memory runs out in backward; a level that this class has not is never launched."""
    (tmp_path / "train.py").write_text(WIDE.replace("AdamW", made))
    request = LaunchRequest(
        script=Script(target="train.py", cwd=str(tmp_path)),
        plans=(Plan(),),
        device="cpu",
        budget=110 * MIB,
        timeout=60,
        converses=True,
    )
    control = Control()
    learned = (each.facts for each in launch(request, control=control) if isinstance(each, Learned))
    facts = next(each for each in learned if each.called)
    control.stop()
    assert not facts.stepped
    assert facts.optimizers == (made,)
    choices = dict(space(H200, facts, allow=Fidelity.EXACT).levels)["optimizer"]
    assert choices == ("as_is", "fused") if made == "AdamW" else ("as_is", "single")


@pytest.mark.full
def test_a_real_search_finds_what_only_several_levels_together_hold(
    command: Callable[..., subprocess.CompletedProcess[str]],
    trials: Callable[..., tuple[TrialRecord, ...]],
    tmp_path: Path,
) -> None:
    """80 MiB of weights: 320 MiB with all that follows, 160 with bf16 weights, 240 released."""
    (tmp_path / "train.py").write_text(WIDE)
    names = ["weights", "gradient_release", "checkpointing", "micro_batch", "precision"]
    only = [word for name in names for word in ("--only", name)]
    asked = ["--memory", "140MiB", "--allow", "recipe", *only, "--json"]
    ran = command("search", "train.py", *asked, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(ran.stdout)
    assert found["plan"]["weights"] == "bf16"
    assert found["plan"]["gradient_release"] == "released"
    assert found["peak_bytes"] <= 140 * MIB
    assert found["launches"] <= 6
    plans = [trial.plan for trial in trials(tmp_path, State.FINISHED)]
    assert plans[0].neutral
    assert plans[1]["weights"] == "bf16", "the arithmetic comes before the trials"
