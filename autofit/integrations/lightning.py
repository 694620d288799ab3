"""A callback for the Trainer of Lightning."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from autofit.integrations.memory import MemoryLog


class ResilientCallback(Callback):
    """Logs peak memory, headroom and rescues through the module's own ``log_dict``.

    The figures go to every logger of the Trainer, each ``log_every_n_steps`` steps::

        lightning.Trainer(logger=logger, callbacks=[ResilientCallback()])

    Under ``autofit run`` and ``@autofit.resilient``, rescues are their retries after an
    out-of-memory error. :class:`~autofit.integrations.memory.MemoryLog` describes the figures.
    """

    def __init__(self) -> None:
        self._memory = MemoryLog()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count rescues from here on."""
        self._memory = MemoryLog()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log the figures of this step."""
        pl_module.log_dict(self._memory.figures(), on_step=True, on_epoch=False)
