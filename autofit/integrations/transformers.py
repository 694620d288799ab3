"""A callback for the Trainer of transformers."""

from __future__ import annotations

import logging
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from autofit.integrations.memory import MemoryLog

log = logging.getLogger("autofit.integrations")


class ResilientCallback(TrainerCallback):
    """Adds peak memory, headroom and rescues to what the Trainer logs.

    Call ``attach`` with the Trainer. The figures then go wherever the Trainer reports:
    TensorBoard, W&B, MLflow, the console, and ``trainer.state.log_history``::

        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        ResilientCallback().attach(trainer)
        trainer.train()

    Under ``autofit run`` and ``@autofit.resilient``, rescues are their retries after an
    out-of-memory error. :class:`~autofit.integrations.memory.MemoryLog` describes the figures.
    """

    def __init__(self) -> None:
        self._memory = MemoryLog()
        self._attached = False

    def attach(self, trainer: Trainer) -> None:
        """Put this callback before those of the Trainer's loggers."""
        callbacks: list[TrainerCallback] = trainer.callback_handler.callbacks
        callbacks[:] = [self, *(each for each in callbacks if each is not self)]
        self._attached = True

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Count rescues from here on."""
        self._memory = MemoryLog()
        if not self._attached:
            log.warning(
                "ResilientCallback comes after the Trainer's loggers, which miss its figures;"
                " use ResilientCallback().attach(trainer)"
            )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the figures to the logs of a training step; leave evaluations as they are."""
        if logs is None or "loss" not in logs:
            return
        figures = self._memory.figures()
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)
