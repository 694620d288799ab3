"""Compiling: what is compiled, in which sizes, what it costs, and whose fault an error is."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._functorch.config
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from autofit.exceptions import Refused
from autofit.facts import Hardware as Machine
from autofit.plan import Plan
from autofit.space.catalogue import clash
from autofit.strategies import Facts, Fidelity, Hardware, RootFacts, compile, get
from autofit.worker.harness.batch.layout import equal_cuts
from autofit.worker.harness.session.root import HarnessRoot, RunPolicy
from autofit.worker.harness.torch_state.compile_state import CompileClock, is_compiled, uncompiled
from autofit.worker.harness.verification.plan_check import prove
from autofit.worker.launch.launcher import launch
from autofit.worker.meter.nvml import cannot_compile
from autofit.worker.records.trials import LaunchRequest, Measurement, Script, TrialReport, Verdict
from tests.roots import Rooted
from tests.strategies.models import Parts

quick, full = pytest.mark.quick, pytest.mark.full

GPU = Machine(device="cuda", name="a GPU", total_bytes=1 << 34, capability=(9, 0))
ROOT = RootFacts(
    name="Net", parameters=1, parameter_bytes=4, trainable=1, dtype="float32", batch=8, blocks=4
)
SCRIPT = """
import sys
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    def forward(self, x):
        return x + self.mlp(self.norm(x))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Sequential(Block(), Block()), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(int(sys.argv[1])):
    x = torch.randn(12, 8)
    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.save(model.state_dict(), "model.pt")
"""


class Block(nn.Module):
    def __init__(self, graphs: str = "one", drop: float = 0.0) -> None:
        super().__init__()
        self.graphs = graphs
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(drop), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.graphs == "two":
            torch._dynamo.graph_break()
        if self.graphs == "none":
            raise ValueError("the script's own")
        changed: torch.Tensor = x + self.mlp(self.norm(x))
        return changed


class Net(nn.Module):
    def __init__(self, graphs: str = "one", drop: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(graphs, drop) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace and differentiate, but make no code."""
    monkeypatch.setattr(compile, "SETTINGS", {"backend": "aot_eager"})


def root_of(module: nn.Module, rooted: Rooted, *, strict: bool = True) -> HarnessRoot:
    return rooted(module, lambda *_: False, RunPolicy(strict=strict))


def gradients(module: nn.Module, held: HarnessRoot, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    module.zero_grad()
    held.running(x).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


# --- what is said before a launch -----------------------------------------------------------


@quick
def test_why_it_is_left_out() -> None:
    strategy = get("compile")
    facts = Facts(roots=(ROOT,))
    assert strategy.unavailable("full", GPU) is None
    assert strategy.inapplicable("regional", facts) is None
    old = replace(GPU, capability=(6, 1))
    lacking = replace(GPU, cannot_compile="Triton is not installed")
    cpu = Hardware(device="cpu", name="CPU", total_bytes=1)
    compiled = Facts(roots=(replace(ROOT, compiled=True),))
    bare = Facts(roots=(replace(ROOT, blocks=0),))
    for level in ("regional", "full"):
        assert "7.0" in (strategy.unavailable(level, old) or "")
        assert strategy.unavailable(level, lacking) == "Triton is not installed"
        assert strategy.unavailable(level, cpu)
        assert "already" in (strategy.inapplicable(level, compiled) or "")
    assert "blocks" in (strategy.inapplicable("regional", bare) or "")
    assert strategy.inapplicable("full", bare) is None
    dropping = Facts(roots=(replace(ROOT, dropout=True),))
    assert "drop" in (strategy.inapplicable("budget", dropping) or "")
    assert strategy.inapplicable("full", dropping) is None


@quick
def test_cuda_graphs_need_a_gpu_and_blocks_and_nothing_compiled() -> None:
    strategy = get("compile")
    old = replace(GPU, capability=(6, 1), cannot_compile="Triton is not installed")
    assert strategy.unavailable("graphs", old) is None
    assert strategy.unavailable("graphs", Hardware(device="cpu", name="CPU", total_bytes=1))
    bare = Facts(roots=(replace(ROOT, blocks=0),))
    assert "blocks" in (strategy.inapplicable("graphs", bare) or "")
    assert strategy.fidelity("graphs", Facts(roots=(ROOT,), autocast=True)) is Fidelity.EXACT
    for other in ({"checkpointing": "all"}, {"activation_offload": "half"}):
        assert "CUDA graph" in (clash(Plan.of({"compile": "graphs", **other})) or "")
    for other in ({"checkpointing": "auto"}, {"micro_batch": "4", "precision": "bf16"}):
        assert clash(Plan.of({"compile": "graphs", **other})) is None


@quick
def test_what_is_missing_on_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "triton.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cannot_compile() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert "C compiler" in (cannot_compile() or "")


@quick
def test_half_precision_of_the_script_is_rounded_less_often() -> None:
    strategy = get("compile")
    assert strategy.fidelity("full", Facts(roots=(ROOT,))) is Fidelity.EXACT
    half = Facts(roots=(replace(ROOT, dtype="bfloat16"),))
    for facts in (half, Facts(roots=(ROOT,), autocast=True)):
        assert strategy.fidelity("regional", facts) is Fidelity.ROUNDING


@quick
def test_one_graph_has_no_blocks_to_checkpoint() -> None:
    for level in ("auto", "2", "all"):
        for whole in ("full", "budget"):
            assert "blocks" in (clash(Plan.of({"compile": whole, "checkpointing": level})) or "")
        assert clash(Plan.of({"compile": "regional", "checkpointing": level})) is None


# --- sizes and seconds ----------------------------------------------------------------------


@quick
@pytest.mark.parametrize(
    ("size", "largest", "sizes"),
    [
        (12, 5, [4, 4, 4]),
        (12, 12, [12]),
        (12, 40, [12]),
        (64, 24, [16] * 4),
        (10, 3, [2] * 5),
        (7, 3, [2, 2, 3]),  # seven is prime: one at a time would be far too slow
        (7, 1, [1] * 7),
    ],
)
def test_chunks_are_of_one_size_as_far_as_that_goes(
    size: int, largest: int, sizes: list[int]
) -> None:
    cuts = equal_cuts(size, largest)
    assert [stop - start for start, stop in cuts] == sizes
    assert [cuts[0][0], cuts[-1][1]] == [0, size]
    assert all(one[1] == other[0] for one, other in itertools.pairwise(cuts))


@quick
def test_the_time_to_compile_is_charged_over_the_horizon() -> None:
    measured = Measurement(
        micro_batch=4,
        effective_batch=8,
        step_seconds=(2.0,),
        peak_allocated=1,
        peak_reserved=1,
        peak_device=1,
        compile_seconds=60.0,
    )
    assert measured.charged(10) == 1.0
    assert measured.charged(60_000_000) == pytest.approx(measured.samples_per_second)


@quick
def test_the_clock_goes_on_when_torch_starts_its_own_anew(light: None) -> None:
    clock = CompileClock()
    before = clock.seconds()
    torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(3))
    first = clock.seconds()
    torch._dynamo.reset()
    assert first > before
    assert clock.seconds() == first
    torch.compile(lambda x: x + 2, backend="aot_eager")(torch.ones(3))
    assert clock.seconds() > first


# --- under a plan ---------------------------------------------------------------------------


@quick
def test_the_blocks_are_compiled_once_and_taken_back(light: None, rooted: Rooted) -> None:
    """In place, beside a split batch, at the size of its chunks alone."""
    module, x = Net(), torch.randn(6, 8)
    names, held = list(module.state_dict()), root_of(module, rooted)
    expected = gradients(module, held, x)
    plan = Plan.of({"compile": "regional", "micro_batch": "4"})
    clock = CompileClock()
    prove(held, plan, (x,), {}, Facts())
    counts = torch._dynamo.utils.counters["stats"]
    graphs = counts["unique_graphs"]
    assert is_compiled(module)
    assert clock.seconds() > 0
    torch.testing.assert_close(gradients(module, held, x), expected)
    again = counts["unique_graphs"]
    assert again - graphs <= 2, "once more without gradients: the chunks that run again"
    torch.testing.assert_close(gradients(module, held, x), expected)
    assert counts["unique_graphs"] == again
    assert list(module.state_dict()) == names
    held.take_back()
    assert not is_compiled(module)


@quick
@pytest.mark.parametrize(
    "widths", [(8, 8, 8), (4, 4, 4), (8, 16, 4)], ids=["alike", "most alike", "unlike"]
)
def test_where_most_blocks_differ_each_has_a_graph(
    widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, rooted: Rooted
) -> None:
    """For its sizes alone; else a graph is for any size once a second one has come."""
    found: list[bool] = []

    def backend(graph: Callable[..., object], inputs: list[object]) -> object:
        found.append(any(isinstance(each, torch.SymInt) for each in inputs))
        return graph

    monkeypatch.setattr(compile, "SETTINGS", {"backend": backend})
    stages = [
        nn.Sequential(nn.Linear(before, after), nn.ReLU())
        for before, after in itertools.pairwise((8, *widths))
    ]
    module = Parts(*stages)
    held = root_of(module, rooted)
    held.apply(Plan.of({"compile": "regional"}))
    for batch in (6, 5):
        for width, stage in zip((8, *widths), stages, strict=False):
            stage(torch.randn(batch, width))
    held.take_back()
    unlike = widths == (8, 16, 4)
    assert any(found) is not unlike
    assert len(found) == 6 or not unlike, "two batches, three blocks"


@quick
def test_roots_are_looked_for_without_being_compiled_in(light: None, rooted: Rooted) -> None:
    """What watches calls while roots are looked for is not there when the compiler looks."""
    module, x = Net(), torch.randn(6, 8)
    held = root_of(module, rooted)
    seams = held._seams
    held.apply(Plan.of({"compile": "full"}))
    seams.watch_inside = False
    seams.look_for_roots()
    try:
        seams.enter()
        gradients(module, held, x)
        seams.leave()
        assert nn.Module.__call__.__wrapped__  # type: ignore[attr-defined]
    finally:
        seams.stop_looking()
    counts = torch._dynamo.utils.counters["stats"]
    graphs = counts["unique_graphs"]
    gradients(module, held, x)
    assert counts["unique_graphs"] == graphs
    held.take_back()


@quick
def test_without_its_code_nothing_is_compiled(light: None, rooted: Rooted) -> None:
    module = Net()
    held = root_of(module, rooted)
    held.apply(Plan.of({"compile": "full"}))
    clock = CompileClock()
    before = clock.seconds()
    with uncompiled():
        gradients(module, held, torch.randn(5, 8))
    assert clock.seconds() == before
    held.take_back()


@quick
def test_within_its_budget_less_is_kept_for_backward(light: None, rooted: Rooted) -> None:
    module, x = Net(), torch.randn(64, 8)
    kept: dict[str, int] = {}
    found: dict[str, torch.Tensor] = {}
    for level in ("as_is", "full", "budget"):
        held = root_of(module, rooted)
        held.apply(Plan.of({"compile": level}))
        sizes: list[int] = []
        with saved_tensors_hooks(lambda t, into=sizes: into.append(t.nbytes) or t, lambda t: t):  # type: ignore[misc]
            held.running(x)
        kept[level], found[level] = sum(sizes), gradients(module, held, x)
        held.take_back()
    assert kept["budget"] < 0.7 * kept["full"] <= 0.7 * kept["as_is"]
    for level in ("full", "budget"):
        torch.testing.assert_close(found[level], found["as_is"])
    assert torch._functorch.config.activation_memory_budget == 1.0


@quick
def test_what_a_budget_would_draw_again_is_refused(light: None, rooted: Rooted) -> None:
    """Where nothing but the proof can see that the model drops."""
    module = Net(drop=0.3)
    held = root_of(module, rooted)
    with pytest.raises(Refused, match="differ"):
        prove(held, Plan.of({"compile": "budget"}), (torch.randn(64, 8),), {}, Facts())
    prove(held, Plan.of({"compile": "full"}), (torch.randn(64, 8),), {}, Facts())
    held.take_back()


@quick
def test_a_limit_reached_refuses_a_trial_and_not_a_run(light: None, rooted: Rooted) -> None:
    def sizes(strict: bool) -> None:
        module = Net()
        held = root_of(module, rooted, strict=strict)
        held.apply(Plan.of({"compile": "full"}))
        torch._dynamo.config.recompile_limit = 1
        try:
            for width in (2, 3, 4):
                gradients(module, held, torch.randn(width, 8, requires_grad=width == 3))
        finally:
            held.take_back()

    sizes(strict=False)
    with pytest.raises(Exception, match="recompile") as caught:
        sizes(strict=True)
    assert "keep changing" in (get("compile").fault(caught.value) or "")


@quick
def test_the_scripts_own_error_is_not_its_fault(light: None, rooted: Rooted) -> None:
    module = Net("none")
    held = root_of(module, rooted)
    held.apply(Plan.of({"compile": "regional"}))
    with pytest.raises(ValueError, match="own") as caught:
        held.running(torch.randn(2, 8))
    assert get("compile").fault(caught.value) is None
    held.take_back()


@quick
def test_the_compilers_error_is_its_fault(monkeypatch: pytest.MonkeyPatch, rooted: Rooted) -> None:
    def broken(graph: object, inputs: object) -> None:
        raise RuntimeError("no code for this")

    monkeypatch.setattr(compile, "SETTINGS", {"backend": broken})
    module = Net()
    held = root_of(module, rooted)
    held.apply(Plan.of({"compile": "regional"}))
    with pytest.raises(RuntimeError) as caught:
        held.running(torch.randn(2, 8))
    assert get("compile").fault(caught.value) == "torch.compile: RuntimeError: no code for this"
    held.take_back()


@quick
def test_what_the_script_compiles_is_left_alone(light: None, rooted: Rooted) -> None:
    module = Net()
    module.head.compile(backend="aot_eager")
    assert is_compiled(module)
    with pytest.raises(Refused, match="already"):
        root_of(module, rooted).apply(Plan.of({"compile": "regional"}))
    assert module.head._compiled_call_impl is not None


@full
@pytest.mark.parametrize("level", ["regional", "full"])
@pytest.mark.parametrize("graphs", ["one", "two"])
def test_the_draws_of_dropout_are_pytorchs_own(level: str, graphs: str, rooted: Rooted) -> None:
    module, x = Net(graphs, 0.3), torch.randn(6, 8)
    held = root_of(module, rooted)
    expected = gradients(module, held, x)
    prove(held, Plan.of({"compile": level}), (x,), {}, Facts())
    torch.testing.assert_close(gradients(module, held, x), expected)
    held.take_back()


class Short(torch.autograd.Function):
    """Memory runs out the first time that backward comes through, where there is something left."""

    left = 0

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        if Short.left:
            Short.left -= 1
            raise torch.OutOfMemoryError("out of memory")
        return gradient


class ShortNet(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(Short.apply(x))  # type: ignore[no-untyped-call]
        return logits


@quick
def test_a_chunk_that_drew_runs_again_as_it_was(light: None, rooted: Rooted) -> None:
    """With what autograd saves in host memory, compiled as before."""
    module, x = ShortNet(drop=0.3), torch.randn(8, 8)
    held = rooted(module, lambda *args: True)
    held.apply(Plan.of({"compile": "regional", "micro_batch": "4"}))
    expected = gradients(module, held, x)
    held.take_back()
    held.apply(Plan.of({"compile": "regional", "micro_batch": "4"}))
    Short.left = 1
    found = gradients(module, held, x)
    assert Short.left == 0
    torch.testing.assert_close(found, expected)
    assert held.splits.chunked is not None
    assert held.splits.chunked.micro_batch < 4
    held.take_back()


@quick
@pytest.mark.parametrize(
    ("level", "module"),
    [
        ("full", nn.Sequential(nn.Linear(8, 8), nn.ReLU())),
        (
            "regional",
            nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True), 3),
        ),
    ],
    ids=["full", "regional"],
)
def test_modules_of_torchs_own_are_compiled(
    level: str, module: nn.Module, monkeypatch: pytest.MonkeyPatch, rooted: Rooted
) -> None:
    """``Module.compile`` makes nothing of them, and does not say so."""
    graphs: list[torch.fx.GraphModule] = []

    def counted(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(compile, "SETTINGS", {"backend": counted})
    held, x = root_of(module, rooted), torch.randn(5, 3, 8, requires_grad=True)
    plain = held.running(x)
    held.apply(Plan.of({"compile": level}))
    torch.testing.assert_close(held.running(x), plain)
    assert len(graphs) == 1, "once for all that are alike"
    held.take_back()
    held.running(x)
    assert len(graphs) == 1


@quick
def test_batch_statistics_move_as_they_do(light: None, rooted: Rooted) -> None:
    module, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), torch.randn(6, 8)
    held = root_of(module, rooted)
    prove(held, Plan.of({"compile": "full"}), (x,), {}, Facts())
    gradients(module, held, x)
    assert module[1].num_batches_tracked == 1
    held.take_back()


@full
def test_a_launch_measures_one_size(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    plans = [
        Plan.of({"micro_batch": "auto"}),
        Plan.of({"micro_batch": "auto", "compile": "regional"}),
        Plan.of({"micro_batch": "5", "compile": "full"}),
        Plan(),
    ]
    request = LaunchRequest(
        script=Script(target="train.py", args=("500",), cwd=str(tmp_path)),
        plans=tuple(plans),
        device="cpu",
        budget=2 << 30,
        timeout=400,
    )
    reports = [event for event in launch(request) if isinstance(event, TrialReport)]
    assert [report.verdict for report in reports] == [Verdict.MEASURED] * 4
    plain, regional, whole, neutral = (report.measurements for report in reports)
    first, last = equal_cuts(12, plain[-1].micro_batch)[-1]
    assert [each.micro_batch for each in regional] == [last - first]
    assert regional[0].compile_seconds > 0
    assert whole[0].compile_seconds > 0
    assert not any(each.compile_seconds for each in (*plain, *neutral))


@full
def test_a_checkpoint_saved_under_it_loads_in_plain_python(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "plan.json").write_text('{"plan": {"compile": "regional"}}')
    command = [sys.executable, "-m", "autofit", "run", "--plan", "plan.json", "train.py", "--", "3"]
    subprocess.run(command, cwd=tmp_path, check=True)
    saved = 'torch.save(model.state_dict(), "model.pt")'
    load = SCRIPT.replace(saved, 'model.load_state_dict(torch.load("model.pt"), strict=True)')
    assert load != SCRIPT
    subprocess.run([sys.executable, "-c", load, "0"], cwd=tmp_path, check=True)
