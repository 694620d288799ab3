"""The callbacks with the real Trainers of transformers and Lightning, on the CPU."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.resilience.switches import inject

FIGURES = {"autofit/peak_gib", "autofit/headroom_gib", "autofit/rescues"}


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sixteen samples."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((4,), float(index))}


def survive_once() -> None:
    """Let a decorated function run out of memory once, and go on."""

    @autofit.resilient(batch_size=4, remember=False)
    def train(batch_size: int, accumulation: int) -> None: ...

    with inject(1):
        train()


@pytest.mark.full
@pytest.mark.parametrize("attached", [True, False])
def test_the_trainer_reports_the_figures(
    attached: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from autofit.integrations.transformers import ResilientCallback

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            if not self.layer.weight.any():
                raise AssertionError
            return {"loss": self.layer(x).square().mean()}

    logged: list[dict[str, float]] = []

    class Logger(TrainerCallback):
        """Gets the logs as those for TensorBoard or W&B do."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.begun = True

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                survive_once()

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            logged.append(dict(kwargs["logs"]))

    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    own = ResilientCallback()
    callbacks: list[TrainerCallback] = [Logger()] if attached else [Logger(), own]
    trainer = Trainer(model=Model(), args=arguments, train_dataset=Rows(), callbacks=callbacks)
    if attached:
        own.attach(trainer)
    with caplog.at_level(logging.WARNING, "autofit.integrations"):
        trainer.train()
    steps = [line for line in logged if "loss" in line]
    assert len(steps) == 3
    assert all(line.keys() >= FIGURES for line in steps) == attached
    assert ("attach(trainer)" in caplog.text) != attached
    history = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["autofit/rescues"] for line in history] == [0, 1, 1]
    assert all(line["autofit/peak_gib"] > 0.05 for line in history)
    assert all(line["autofit/headroom_gib"] > 0 for line in history)
    assert not FIGURES & logged[-1].keys()  # the summary at the end is no step


@pytest.mark.full
def test_lightning_logs_the_figures(tmp_path: Path) -> None:
    import lightning
    from lightning.pytorch.loggers import CSVLogger

    from autofit.integrations.lightning import ResilientCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            if index == 2:
                survive_once()
            loss: torch.Tensor = self.layer(batch["x"]).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    logger = CSVLogger(tmp_path)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=logger,
        log_every_n_steps=1,
        callbacks=[ResilientCallback()],
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Rows(), batch_size=4))
    lines = Path(logger.log_dir, "metrics.csv").read_text().splitlines()
    names = lines[0].split(",")
    rows = [dict(zip(names, line.split(","), strict=True)) for line in lines[1:]]
    assert [float(row["autofit/rescues"]) for row in rows] == [0, 0, 1, 1]
    assert all(float(row["autofit/peak_gib"]) > 0.05 for row in rows)


RESCUED = """\
import json, torch
from torch import nn
from autofit.integrations.memory import MemoryLog

memory = MemoryLog()
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x = torch.randn(16, 64)
    if step == 1:
        real, model[1].forward = model[1].forward, lambda x: fail()
    def fail():
        model[1].forward = real
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(json.dumps(memory.figures()))
"""


@pytest.mark.full
def test_a_rescue_of_a_real_run_counts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RESCUED)
    (tmp_path / "plan.json").write_text('{"plan": {"micro_batch": "8"}}')
    words = ["run", "--plan", "plan.json", "train.py"]
    done = subprocess.run(
        [sys.executable, "-m", "autofit", *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["autofit/rescues"] >= 1, done.stderr


@pytest.mark.quick
def test_the_figures_of_a_process() -> None:
    from autofit.integrations.memory import MemoryLog

    memory = MemoryLog()
    survive_once()
    found = memory.figures()
    assert found.keys() == FIGURES
    assert found["autofit/rescues"] == 1
    assert 0.05 < found["autofit/peak_gib"] < 64
    assert MemoryLog().figures()["autofit/rescues"] == 0
