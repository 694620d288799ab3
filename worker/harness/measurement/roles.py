"""What a model's tensors are for: weights, gradients or an optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from autofit.strategies.support.bitsandbytes import SMALL
from autofit.worker.harness.measurement.allocations import AllocationLog
from autofit.worker.harness.patching.gradient_reads import gradient_of
from autofit.worker.harness.patching.observers import Watcher
from autofit.worker.harness.session.session import Session
from autofit.worker.records.inspection import TensorKind


class Roles(Watcher):
    """Marks the tensors of a session's models and optimizers in a log."""

    def __init__(self, session: Session, log: AllocationLog) -> None:
        self._session, self._log = session, log
        self._optimizers: dict[int, Optimizer] = {}

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        """Mark the gradients that the step uses."""
        self._optimizers[id(optimizer)] = optimizer
        self.mark_gradients()

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Mark the optimizer's state."""
        paths = {id(p): path for path, m in self._modules() for p in m.parameters(recurse=False)}
        tables = (nn.Embedding, nn.EmbeddingBag)  # their state stays in 32 bits
        embeddings = {id(m.weight) for _, m in self._modules() if isinstance(m, tables)}
        for parameter, state in optimizer.state.items():
            small = parameter.numel() < SMALL or id(parameter) in embeddings
            for tensor in tree_leaves(state):
                path = paths.get(id(parameter), "")
                self._log.mark(tensor, TensorKind.OPTIMIZER_STATE, path, quantized=not small)

    def mark_weights(self) -> None:
        """Mark parameters and buffers."""
        for root in self._session.roots:
            if root.alive:
                self._log.modules.learn(root.module)
        for path, module in self._modules():
            for tensor in chain(module.parameters(recurse=False), module.buffers(recurse=False)):
                self._log.mark(tensor, TensorKind.WEIGHTS, path)

    def mark_gradients(self) -> None:
        """Mark the gradients of the parameters."""
        for path, module in self._modules():
            for parameter in module.parameters(recurse=False):
                self._log.mark(gradient_of(parameter), TensorKind.GRADIENTS, path)

    def mark_all(self) -> None:
        """Mark whatever exists now."""
        self.mark_weights()
        self.mark_gradients()
        for optimizer in self._optimizers.values():
            self.optimizer_stepped(optimizer)

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield each module of the roots, with its name."""
        for root in self._session.modules():
            for module in root.modules():
                yield self._log.modules.name_of(module), module
