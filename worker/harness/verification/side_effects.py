"""Refuses a split if a forward has effects other than its output.

A model may store a loss in an attribute, and a hook may store features or put them into a queue.
The script uses them beside the output, and under a split they would come from one chunk. State that
each call updates in the same way, whatever its samples, is allowed (``state_updates``). The forward
may not change its arguments. It may not use other tensors that require gradients than parameters
and arguments, because the split does not know them.
"""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autofit.exceptions import Refused
from autofit.worker.harness.batch.layout import Batch
from autofit.worker.harness.torch_state.graph import differentiated
from autofit.worker.harness.torch_state.module_state import near
from autofit.worker.harness.torch_state.modules import foreign
from autofit.worker.harness.torch_state.reachable_state import (
    ABSENT,
    Absent,
    Place,
    Snapshot,
    changes,
    tensors_of,
)
from autofit.worker.harness.torch_state.state_kinds import PLAIN, Large


def refuse_listeners(module: nn.Module) -> None:
    """Raise ``Refused`` if the script has a backward hook inside the root."""
    for name, each in module.named_modules():
        if foreign(each._backward_hooks) or foreign(each._backward_pre_hooks):
            where = f"on {name}" if name else "on the model"
            raise Refused(
                f"a backward hook of the script {where} would see gradients of parts of the batch"
            )


def refuse_checkpoint_around() -> None:
    """Raise ``Refused`` if a checkpoint of the script will run the root again, in a backward."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint":
        raise Refused(
            "the script checkpoints the whole model, which would run in one piece in backward"
        )


def refuse_changed_arguments(part: Batch, before: list[int | None], after: Batch) -> None:
    """Raise ``Refused`` if a forward has changed its arguments or their containers.

    ``before``: the tensors' ``versions``; ``after``: the arguments after the forward.
    """
    kept = after.spec == part.spec and all(map(operator.is_, after.leaves, part.leaves))
    if not kept or versions(part) != before:
        raise Refused("the model changes its arguments in place")


def versions(part: Batch) -> list[int | None]:
    """Return the version of each tensor among the arguments."""
    return [
        leaf._version if isinstance(leaf, torch.Tensor) and not leaf.is_inference() else None
        for leaf in part.leaves
    ]


def weights(module: nn.Module) -> list[float]:
    """Return the norm of each parameter, to detect a forward that changes it."""
    with torch._C.DisableTorchFunction(), torch.no_grad():  # the parameters, no shifted weights
        plain: list[torch.Tensor] = [
            p
            for p in module.parameters()
            if type(p) is nn.Parameter and p.numel()
            if p.is_floating_point() and p.layout is torch.strided
        ]
        return [float(norm) for norm in torch._foreach_norm(plain)]


def state_updates(
    start: Snapshot, first: Snapshot, later: Sequence[tuple[Snapshot, Snapshot]]
) -> tuple[Place, ...]:
    """Return the state that each call updates in the same way.

    ``first``: the state after a call from ``start``; ``later``: those before and after others. A
    table that only the first call creates, such as one of positions, does not count; a switch that
    it sets does.
    """
    switches = [k for k in changes(start, first) if _is_plain(start, k) and _is_plain(first, k)]
    every = [key for before, after in later for key in changes(before, after)]
    return start.places(dict.fromkeys((*every, *switches)), later[-1][1] if later else first)


def refuse_other_changes(
    start: Snapshot, whole: Snapshot, chunk: Snapshot, tolerance: float
) -> None:
    """Raise ``Refused`` unless a chunk has changed the state as all samples have.

    All three states begin with ``start``. A new tensor whose size depends on the number of samples
    is a table: the comparison of outputs shows whether its content depends on the samples. An item
    of a container is none, because somebody collects it.
    """
    for key in changes(whole, chunk):
        one, other = whole.values.get(key), chunk.values.get(key)
        may_be_table = key not in start.values and "[" not in key[0]
        if near(one, other, tolerance) or (may_be_table and _is_table(one, other)):
            continue
        if key[0].startswith("buffer"):
            raise Refused(f"the model changes its {key[0]} in every forward")
        raise Refused(f"the model keeps something of its forward for later: its {key[0]}")


def refuse_changes_in_backward(after: Snapshot, now: Snapshot) -> None:
    """Raise ``Refused`` if a backward has changed the state since ``after``, its forward."""
    for name, _ in changes(after, now):
        raise Refused(f"the model's {name} changes in its backward")


def _is_table(one: Any, other: Any) -> bool:
    shapes = [
        value[0].shape
        for value in (one, other)
        if isinstance(value, tuple) and value and isinstance(value[0], (torch.Tensor, Large))
    ]
    return len(shapes) == 2 and shapes[0] != shapes[1]


def _is_plain(snapshot: Snapshot, key: tuple[str, str]) -> bool:
    return isinstance(snapshot.values.get(key, ABSENT), (*PLAIN, Absent))


class Witness(TorchDispatchMode):
    """Records every tensor that a forward creates, by weak references."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: set[torch.dtype] = set()
        """The floating-point data types among them."""
        self._made: dict[int, StorageWeakRef] = {}
        self._given: dict[int, StorageWeakRef] = {}
        """Storages that existed before."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in _strided((args, kwargs)):
            self._note(tensor, self._given)
        output = func(*args, **(kwargs or {}))
        for tensor in _strided(output):
            if tensor.is_floating_point():
                self.dtypes.add(tensor.dtype)
            self._note(tensor, self._made)
        return output

    def _note(self, tensor: torch.Tensor, among: dict[int, StorageWeakRef]) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        if reference.cdata not in self._made and reference.cdata not in self._given:
            among[reference.cdata] = reference

    def still_alive(self, known: Iterable[torch.Tensor]) -> int:
        """Return how many created tensors still exist and are not ``known``."""
        own = {tensor.untyped_storage()._cdata for tensor in known}
        return sum(not ref.expired() for key, ref in self._made.items() if key not in own)


def _strided(tree: Any) -> list[torch.Tensor]:
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return [tensor for tensor in tensors if tensor.layout is torch.strided]


class Escapes:
    """Refuses a model that keeps a part of its forward for later, or uses foreign weights."""

    def __init__(self, module: nn.Module, part: Batch, anchor: torch.Tensor) -> None:
        """``anchor``: stands for the parameters in a graph."""
        self.witness = Witness()
        """Is to see the forward."""
        self._module = module
        self._part = part
        self._own = {id(each) for each in (*module.parameters(), *part.leaves, anchor)}
        self._foreign: list[weakref.ref[torch.Tensor]] = []

    def note_graph(self, outputs: Iterable[Any]) -> None:
        """Note which tensors other than the module's a backward would bring gradients to.

        Some of transformers' models create a tensor that requires gradients from a waveform. Only
        the graph holds that tensor, so nobody can read its gradient.
        """
        reached = differentiated(outputs)
        self._foreign = [weakref.ref(each) for each in reached if id(each) not in self._own]

    def refuse_escapes(self, outputs: Iterable[Any]) -> None:
        """Raise ``Refused`` if more than ``outputs`` is left once the graph is freed."""
        torch.clear_autocast_cache()
        _drop_graphs_of_weights(self._module)
        held = _strided(list(tensors_of(self._module)))
        known = [*held, *_strided([*outputs, *self._part.leaves])]
        if self.witness.still_alive(known):
            gc.collect()
        if any(each.grad_fn is not None for each in held) or self.witness.still_alive(known):
            others = [o for o in outputs if not (isinstance(o, torch.Tensor) or callable(o))]
            for name in (type(each).__name__ for each in others if hasattr(each, "__dict__")):
                raise Refused(f"the model returns a {name}, whose tensors cannot be joined")
            raise Refused(
                "the model keeps a part of its forward for later, in an attribute or by a hook"
            )

    def refuse_foreign(self) -> None:
        """Raise ``Refused`` if somebody can read the gradient of a tensor that was noted."""
        if any(each() is not None for each in self._foreign):
            gc.collect()
        if any(each() is not None for each in self._foreign):
            raise Refused("the model uses tensors that need gradients and are not its parameters")


def _drop_graphs_of_weights(module: nn.Module) -> None:
    """Detach the weights that torch's own hooks recompute before each forward.

    ``torch.nn.utils.weight_norm`` and ``spectral_norm`` store them as plain attributes.
    """
    for each in module.modules():
        for hook in each._forward_pre_hooks.values():
            if isinstance(hook, (WeightNorm, SpectralNorm)):
                vars(each)[hook.name] = vars(each)[hook.name].detach()
