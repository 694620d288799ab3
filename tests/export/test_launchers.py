"""The formats for other launchers, read back by what will read them; what they lack is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autofit import strategies
from autofit.analysis.result import Result
from autofit.export import lost, render
from autofit.launch_lines.parse import read_accelerate
from autofit.plan import Plan
from autofit.strategies import AS_IS, NAMES, Facts, Hardware
from autofit.worker.records.trials import Script

MakeResult = Callable[..., Result]

PLAN = Plan.of({"precision": "bf16", "checkpointing": "all", "micro_batch": "8"})
CPU = Hardware(device="cpu", name="a CPU", total_bytes=1 << 34)
FSDP = (
    "--use_fsdp --fsdp_version 2 --num_processes 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"
    " --fsdp_transformer_layer_cls_to_wrap Block --fsdp_offload_params true train.py"
)
RANK = """\
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(())
dist.all_reduce(total)
os.write(1, f"{dist.get_rank()} {int(total)} {sys.argv[1:]} {os.environ['SET']}\\n".encode())
dist.barrier()  # else gloo may stop or abort the process at its end
dist.destroy_process_group()
"""


def every_level() -> Iterator[Plan]:
    """Yield each level of each strategy in a plan of its own."""
    for name in NAMES:
        for level in strategies.get(name).levels:
            if level.name != AS_IS:
                yield Plan.of({name: level.name})


def settings(text: str) -> list[str]:
    """The lines that are no comments."""
    return [line for line in text.splitlines() if not line.startswith("#")]


@pytest.mark.quick
@pytest.mark.parametrize("form", ["accelerate", "lightning", "trainer"])
def test_a_level_is_set_or_named_and_never_lost(form: str, make_result: MakeResult) -> None:
    facts = Facts(optimizers=("AdamW",))
    plain = settings(render(form, make_result(Plan(), facts=facts)))
    for plan in every_level():
        result = make_result(plan, facts=facts)
        text = render(form, result, partial=True)
        ((name, level),) = plan.changes
        left_out = bool(lost(form, result))
        assert (f"has no setting for it: {name} {level}\n" in text) == left_out, plan
        assert all(f"# Set before Python starts: {key}=" in text for key in plan.environment), plan
        assert (settings(text) != plain) == (not left_out and not plan.environment), plan


@pytest.mark.quick
def test_accelerate_launches_as_the_config_says(make_result: MakeResult, tmp_path: Path) -> None:
    plan = Plan.of({"precision": "bf16", "compile": "regional", "micro_batch": "8"})
    file = tmp_path / "config.yaml"
    file.write_text(render("accelerate", make_result(plan, ranks=2), partial=True))
    found = read_accelerate(["--config_file", str(file), "train.py"])
    assert found.ranks == 2
    assert found.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    text = file.read_text()
    assert "distributed_type: MULTI_GPU" in text
    assert "dynamo_use_regional_compilation: true" in text
    assert "no setting for it: micro_batch 8" in text
    assert "by hand: DataLoader(batch_size=8), Accelerator(gradient_accumulation_steps=1)" in text


@pytest.mark.quick
def test_fsdp_of_the_launch_line_comes_back(make_result: MakeResult, tmp_path: Path) -> None:
    before = read_accelerate(FSDP.split())
    script = Script(
        target="train.py", cwd="/project", environment=tuple(sorted(before.environment.items()))
    )
    plan = Plan.of({"checkpointing": "all"})
    file = tmp_path / "config.yaml"
    file.write_text(render("accelerate", make_result(plan, ranks=2, script=script)))
    after = read_accelerate(["--config_file", str(file), "train.py"])
    changed = dict(before.environment) | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}
    assert dict(after.environment) == changed
    assert "no setting" not in file.read_text()


@pytest.mark.full
@pytest.mark.parametrize("plan", [Plan(), PLAN], ids=["as it is", "tuned"])
def test_a_shell_starts_the_ranks(plan: Plan, make_result: MakeResult, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANK)
    script = Script(
        target="train.py",
        cwd=str(tmp_path),
        args=("--name", "a b"),
        environment=(("SET", "by it"), ("WORLD_SIZE", "1")),
    )
    result = make_result(plan, ranks=2, script=script, hardware=CPU)
    (tmp_path / "train.sh").write_text(render("torchrun", result))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "train.sh"],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines == [f"{rank} 2 ['--name', 'a b'] by it" for rank in (0, 1)]
    if not plan.neutral:
        kept = json.loads((tmp_path / "autofit-plan.json").read_text())
        assert Plan.of(kept["plan"]) == plan
