"""Exported forms are trained with, without autofit: the losses are those of `autofit run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from autofit.analysis.result import Result
from autofit.export import render
from autofit.facts import RootFacts
from autofit.plan import Plan
from autofit.strategies import Facts, Hardware
from autofit.worker.records.trials import Script

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
MakeResult = Callable[..., Result]
CPU = Hardware(device="cpu", name="a CPU", total_bytes=1 << 34)
EXACT = Plan.of({"checkpointing": "all", "optimizer": "fused", "micro_batch": "8"})
LOW = Plan.of({"precision": "bf16"})
NET = RootFacts(name="Net", parameters=1, parameter_bytes=4, trainable=1, dtype="float32")
TOLERANCES = {EXACT: 1e-5, LOW: 1e-3}
BEGIN = """\
import random, sys, torch
from torch import nn
torch.manual_seed(0)
"""
TRAINER = (
    BEGIN
    + """
from transformers import (
    HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments,
)

class Losses(TrainerCallback):
    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            print("loss", repr(logs["loss"]), flush=True)

fields = {"optim": "adamw_torch"}
if len(sys.argv) > 1:
    import yaml
    fields |= yaml.safe_load(open(sys.argv[1]))
arguments = TrainingArguments(
    **{"output_dir": "out", "max_steps": 6, "per_device_train_batch_size": 16, "use_cpu": True,
       "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
       "learning_rate": 1e-3, **fields}
)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
         "num_attention_heads": 2, "vocab_size": 60}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**sizes))
words = torch.randint(60, (96, 12))
rows = [{"input_ids": each, "labels": each} for each in words]
Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Losses()]).train()
"""
)
ACCELERATE = (
    BEGIN
    + """
from accelerate import Accelerator
accelerator = Accelerator()
model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(6):
    x = torch.randn(16, 8)
    loss = nn.functional.cross_entropy(model(x), x.argmax(1))
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    print("loss", repr(loss.item()), flush=True)
"""
)
LIGHTNING = (
    BEGIN
    + """
import lightning

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self(batch), batch.argmax(1))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

class Losses(lightning.Callback):
    parts = []

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.parts.append(outputs["loss"].item())
        if len(self.parts) == max(1, 16 // len(batch)):
            print("loss", repr(sum(self.parts)), flush=True)
            self.parts.clear()

size, arguments = 16, {}
if len(sys.argv) > 1:
    names = {}
    exec(open(sys.argv[1]).read(), names)
    size, arguments = int(sys.argv[2]), names["ARGUMENTS"]
own = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "callbacks": [Losses()]}
own["callbacks"] += arguments.pop("callbacks", [])
own |= {"accelerator": "cpu", "gradient_clip_val": 0.5, "enable_progress_bar": False, **arguments}
trainer = lightning.Trainer(MORE)
loader = torch.utils.data.DataLoader(torch.randn(96, 8), batch_size=16, shuffle=True)
trainer.fit(Net(), loader)
"""
)
BY_ARGUMENTS = LIGHTNING.replace("MORE", "**own").replace("batch_size=16", "batch_size=size")
BY_PATCH = LIGHTNING.replace(
    "MORE",
    "max_epochs=1, logger=False, enable_checkpointing=False, callbacks=[Losses()],"
    ' accelerator="cpu", gradient_clip_val=0.5, enable_progress_bar=False',
)
PLAIN = (
    BEGIN
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).tanh()
        return x

model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(6):
    x = torch.randn(16, 8)
    y = x.argmax(1)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    print("loss", repr(loss.item()), flush=True)
"""
)


def losses(folder: Path, *command: str) -> list[float]:
    """Run a program of this environment; return the losses that it prints."""
    tools = Path(sys.executable).parent
    done = subprocess.run(
        [str(tools / command[0]), *command[1:]],
        cwd=folder,
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [float(line.split()[1]) for line in done.stdout.splitlines() if line[:5] == "loss "]
    assert len(found) == 6, done.stdout
    return found


@pytest.mark.parametrize(
    ("text", "form", "plan", "start"),
    [
        (TRAINER, "trainer", EXACT, ("python", "train.py", "exported")),
        (TRAINER, "trainer", LOW, ("python", "train.py", "exported")),
        (
            ACCELERATE,
            "accelerate",
            LOW,
            ("accelerate", "launch", "--config_file", "exported", "train.py"),
        ),
        (BY_ARGUMENTS, "lightning", EXACT, ("python", "train.py", "exported", "8")),
        (BY_ARGUMENTS, "lightning", LOW, ("python", "train.py", "exported", "16")),
        (BY_PATCH, "patch", EXACT, ("python", "train.py")),
        (BY_PATCH, "patch", LOW, ("python", "train.py")),
        (PLAIN, "patch", EXACT, ("python", "train.py")),
        (PLAIN, "patch", LOW, ("python", "train.py")),
    ],
    ids=[
        "trainer",
        "trainer bf16",
        "accelerate bf16",
        "lightning",
        "lightning bf16",
        "patch of lightning",
        "patch of lightning bf16",
        "patch",
        "patch bf16",
    ],
)
def test_the_losses_are_those_of_the_plan(
    text: str,
    form: str,
    plan: Plan,
    start: Sequence[str],
    make_result: MakeResult,
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "plan.json").write_text(json.dumps({"plan": dict(plan.changes)}))
    as_it_is = losses(tmp_path, "python", "train.py")
    planned = losses(tmp_path, "autofit", "run", "--plan", "plan.json", "train.py")
    result = make_result(
        plan,
        script=Script(target="train.py", cwd=str(tmp_path)),
        facts=Facts(optimizers=("AdamW",), roots=(NET,)),
        hardware=CPU,
    )
    (tmp_path / "exported").write_text(render(form, result))
    if form == "patch":
        subprocess.run(["git", "apply", "exported"], cwd=tmp_path, check=True)
    assert losses(tmp_path, *start) == pytest.approx(planned, rel=TOLERANCES[plan])
    if plan == LOW:
        assert planned != as_it_is
