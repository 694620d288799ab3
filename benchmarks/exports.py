"""Exported forms beside ``autofit run``: losses, peak memory and speed, each in its own process.

    python benchmarks/exports.py [--steps 40] [--case patch] [--case trainer] [--out FOLDER]

``patch`` is a plain loop under the diff. ``trainer`` is a Llama-style model in the Trainer, with
the exported arguments. ``accelerate`` is a loop with an ``Accelerator``, under the config file. The
plan is given, so no search runs. Both forms run ``TURNS`` times in turn, because the speed of a
machine varies; each has its fastest median. The models are so large that the GPU, not Python,
decides the time of a step. Peaks are those of torch's allocator in the training.
Writes ``exports.json`` and ``exports.md`` after each case, and keeps what they hold of others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from grid import RESULTS, merged, programs

from autofit.analysis.result import Result
from autofit.export import render
from autofit.facts import Facts, Hardware
from autofit.plan import Plan
from autofit.worker.records.trials import Measurement, Script, Verdict

TURNS = 2
"""Runs of each form."""
HEAD = """\
# Exported forms, trained without autofit

Written by `python benchmarks/exports.py` on one NVIDIA H200. Ratios are those to `autofit run`.

"""
ALLOWED = 1.05
"""Largest ratio of peaks and of speeds."""
DROPPED = 10
"""Steps at the beginning that count as warm-up."""
WATCH = '''\
"""Python imports this at its start: each loss is timed, and the peak is written at the end."""
import atexit, os, sys, time

if sys.argv[:1] and os.path.basename(sys.argv[0]) != "accelerate":

    def report():
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            peak = torch.cuda.max_memory_allocated()
            with open(os.environ["EXPORTS_PEAKS"], "a") as file:
                file.write(f"{peak}\\n")

    atexit.register(report)
'''
BEGIN = """\
import sys, time, torch
from torch import nn
STEPS = int(sys.argv[1])
"""
TRAINER = (
    BEGIN
    + """
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

class Losses(TrainerCallback):
    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            print("loss", repr(logs["loss"]), time.perf_counter(), flush=True)

fields = {"optim": "adamw_torch"}
if len(sys.argv) > 2:
    import yaml
    fields |= yaml.safe_load(open(sys.argv[2]))
arguments = TrainingArguments(
    **{"output_dir": "out", "max_steps": STEPS, "per_device_train_batch_size": 32,
       "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
       "learning_rate": 1e-4, **fields}
)
sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8,
         "num_attention_heads": 16, "vocab_size": 16000}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**sizes))
words = torch.randint(16000, (512, 512))
rows = [{"input_ids": each, "labels": each} for each in words]
Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Losses()]).train()
"""
)
ACCELERATE = (
    BEGIN
    + """
from accelerate import Accelerator
accelerator = Accelerator()
torch.manual_seed(0)
block = lambda: nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True)
model = nn.Sequential(*[block() for _ in range(12)], nn.Linear(1024, 100))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(STEPS):
    x = torch.randn(32, 512, 1024, device=accelerator.device)
    y = torch.randint(100, (32,), device=accelerator.device)
    loss = nn.functional.cross_entropy(model(x).mean(1), y)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    print("loss", repr(loss.item()), time.perf_counter(), flush=True)
"""
)
PLAIN = (
    BEGIN
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(2048, 16, 8192, dropout=0.0, batch_first=True)
            for _ in range(8)
        )
        self.head = nn.Linear(2048, 100)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = Net().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(STEPS):
    x = torch.randn(32, 512, 2048, device=device)
    y = torch.randint(100, (32,), device=device)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    print("loss", repr(loss.item()), time.perf_counter(), flush=True)
"""
)
TUNED = {"precision": "bf16", "checkpointing": "all", "optimizer": "fused", "micro_batch": "16"}


@dataclass(frozen=True, slots=True)
class Case:
    """A script, a plan, and how the exported form is started."""

    script: str
    form: str
    plan: Plan
    start: tuple[str, ...]
    """The words before the number of steps; those after it follow ``{steps}``."""


CASES = {
    "patch": Case(PLAIN, "patch", Plan.of(TUNED), ("python", "train.py", "{steps}")),
    "trainer": Case(
        TRAINER, "trainer", Plan.of(TUNED), ("python", "train.py", "{steps}", "exported")
    ),
    "accelerate": Case(
        ACCELERATE,
        "accelerate",
        Plan.of({"precision": "bf16"}),
        ("accelerate", "launch", "--config_file", "exported", "train.py", "{steps}"),
    ),
}


@dataclass(frozen=True, slots=True)
class Run:
    """What one run showed."""

    losses: tuple[float, ...]
    step_seconds: float
    """The median, without the first steps."""
    peak: int
    """Bytes; 0 without a GPU."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Both runs of a case."""

    name: str
    plan: str
    planned: Run
    exported: Run

    @property
    def loss_difference(self) -> float:
        """Return the largest relative difference between two losses of a step."""
        pairs = zip(self.planned.losses, self.exported.losses, strict=True)
        return max(abs(a - b) / abs(a) for a, b in pairs)

    @property
    def speed(self) -> float:
        """Return the exported form's speed over that of ``autofit run``."""
        return self.planned.step_seconds / self.exported.step_seconds

    @property
    def peak(self) -> float:
        """Return the exported form's peak over that of ``autofit run``; 1 without a GPU."""
        return self.exported.peak / self.planned.peak if self.planned.peak else 1.0


def run(folder: Path, words: Sequence[str]) -> Run:
    """Run a program of this environment and return its losses, step time and peak."""
    peaks = folder / "peaks"
    peaks.unlink(missing_ok=True)
    path = os.pathsep.join(filter(None, [str(folder / "watch"), os.environ.get("PYTHONPATH", "")]))
    more = {"PATH": f"{folder / 'programs'}:{os.environ['PATH']}", "PYTHONPATH": path}
    done = subprocess.run(
        [folder / "programs" / words[0], *words[1:]],
        cwd=folder,
        env={**os.environ, **more, "EXPORTS_PEAKS": str(peaks)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("loss ")]
    times = [float(line[2]) for line in lines][DROPPED:]
    steps = [b - a for a, b in pairwise(times)]
    found = [int(line) for line in peaks.read_text().split()] if peaks.exists() else []
    return Run(
        tuple(float(line[1]) for line in lines),
        statistics.median(steps) if steps else 0.0,
        max(found, default=0),
    )


def compare(name: str, steps: int) -> Compared:
    """Run a case under ``autofit run`` and in its exported form."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "watch").mkdir()
        programs(folder)
        (folder / "watch/sitecustomize.py").write_text(WATCH)
        for script in ("plain.py", "train.py"):  # the patch changes the second
            (folder / script).write_text(case.script)
        (folder / "plan.json").write_text(json.dumps({"plan": dict(case.plan.changes)}))
        tuned = ("autofit", "run", "--plan", "plan.json", "plain.py", "--", str(steps))
        (folder / "exported").write_text(render(case.form, result(case.plan, folder)))
        if case.form == "patch":
            subprocess.run(["git", "apply", "exported"], cwd=folder, check=True)
        by_hand = [word.format(steps=steps) for word in case.start]
        run(folder, ("autofit", "run", "--verify-only", *tuned[2:]))
        runs = [(run(folder, tuned), run(folder, by_hand)) for _ in range(TURNS)]
        planned, exported = (
            min(form, key=lambda r: r.step_seconds) for form in zip(*runs, strict=True)
        )
        return Compared(name, str(case.plan), planned, exported)


def result(plan: Plan, folder: Path) -> Result:
    """Return a result with this plan, as a search would have found it here."""
    cuda = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if cuda else "CPU"
    measured = Measurement(
        micro_batch=16,
        effective_batch=32,
        step_seconds=(1.0,),
        peak_allocated=1,
        peak_reserved=1,
        peak_device=1,
    )
    return Result(
        study="",
        script=Script(target="train.py", cwd=str(folder)),
        hardware=Hardware(device="cuda" if cuda else "cpu", name=name, total_bytes=1),
        budget=1,
        plan=plan,
        measurement=measured,
        confirmed=True,
        fidelity=str(plan.fidelity()),
        baseline=None,
        baseline_verdict=Verdict.INTERRUPTED,
        variation=0.0,
        trials=1,
        launches=1,
        launches_out_of_memory=0,
        search_seconds=1.0,
        versions={},
        facts=Facts(optimizers=("AdamW",)),
    )


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return the figures as a table in Markdown."""
    rows = [
        "| export | plan | largest difference of a loss | peak, ratio | speed, ratio |",
        "|---|---|---|---|---|",
        *(
            f"| {e['name']} | {e['plan']} | {e['loss_difference']:.1e} | {e['peak']:.3f} "
            f"| {e['speed']:.3f} |"
            for e in found
        ),
    ]
    return "\n".join(rows) + "\n"


def main() -> int:
    """Compare the cases, write the results and return 1 if a ratio is out of bounds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.out.mkdir(exist_ok=True)
    kept, within = options.out / "exports.json", True
    for name in options.case or CASES:
        each = compare(name, options.steps)
        ratios = {
            "loss_difference": each.loss_difference,
            "peak": each.peak,
            "speed": each.speed,
        }
        within &= all(1 / ALLOWED <= ratio <= ALLOWED for ratio in (each.peak, each.speed))
        before = json.loads(kept.read_text()) if kept.exists() else []
        found = merged(before, [asdict(each) | ratios], "name")
        kept.write_text(json.dumps(found, indent=1) + "\n")
        (options.out / "exports.md").write_text(HEAD + table(found))
        sys.stdout.write(table([asdict(each) | ratios]))
        sys.stdout.flush()
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
