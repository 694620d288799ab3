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
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autofit.exceptions import Refused
from autofit.strategies.base import Forward
from autofit.worker.harness.batch.layout import Batch
from autofit.worker.harness.torch_state.graph import differentiated
from autofit.worker.harness.torch_state.module_state import near
from autofit.worker.harness.torch_state.reachable_state import (
    ABSENT,
    Absent,
    Key,
    Place,
    Snapshot,
    changes,
    tensors_of,
)
from autofit.worker.harness.torch_state.state_kinds import PLAIN, Large
from autofit.worker.oom.attempt import attempt_model


def refuse_listeners(module: nn.Module) -> None:
    """Raise ``Refused`` if the script has a backward hook inside the root."""
    for name, each in module.named_modules():
        hooks = [*each._backward_hooks.values(), *each._backward_pre_hooks.values()]
        if any(not str(getattr(hook, "__module__", "")).startswith("autofit.") for hook in hooks):
            where = f"on {name}" if name else "on the model"
            raise Refused(f"a backward hook of the script {where} would see each part's gradient")


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
    plain = [p.detach() for p in module.parameters() if type(p) is nn.Parameter and p.numel()]
    return [float(norm) for norm in torch._foreach_norm([p for p in plain if _fraction(p)])]


def _fraction(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.layout is torch.strided


def state_updates(
    start: Snapshot, whole: Batch, chunk: Batch, forward: Forward, after: Snapshot, *, draws: bool
) -> tuple[Place, ...]:
    """Return the state that each call updates.

    Raises ``Refused`` if the update depends on the samples.
    ``after`` is the state after ``whole`` has run from ``start``. A table that only the first call
    creates, such as one of positions, does not count; a switch that the first call sets does.
    ``draws``: the forward draws random numbers, so that another call may update something else.
    """
    first = changes(start, after)
    again = _state_after(start.module, whole, forward) if first or draws else after
    every = changes(after, again)
    steady = not first and not every
    if not steady:
        start.restore()

    def compare() -> list[Key]:
        other = _state_after(start.module, chunk, forward)
        differing = [key for key in changes(after, other) if not _is_table(key, after, other)]
        if steady:  # the chunk would start from the same state after the whole
            return differing
        start.restore()
        _state_after(start.module, whole, forward)
        return differing + changes(again, _state_after(start.module, chunk, forward))

    outcome = attempt_model(compare)
    if first and outcome.failure is not None:  # such as statistics of a single sample
        raise Refused(_remembered_text(first[0][0])) from outcome.failure
    if differing := outcome.result():
        raise Refused(_remembered_text(differing[0][0]))
    switches = [key for key in first if _is_plain(start, key) and _is_plain(after, key)]
    return start.places(dict.fromkeys((*every, *switches)), again)


def refuse_changes_in_backward(
    start: Snapshot, after: Snapshot, with_graph: Mapping[Key, Any]
) -> None:
    """Raise ``Refused`` if a backward, or only a forward with a graph, changes the state.

    ``after``: a forward without a graph; ``with_graph``: the changes of a forward with a graph and
    its backward.
    """
    without = set(changes(start, after))
    for key, value in with_graph.items():
        if key not in without or not near(value, after.values.get(key), None):
            raise Refused(f"the model changes its {key[0]} in a backward")


def _is_table(key: Key, one: Snapshot, other: Snapshot) -> bool:
    """Return whether the size of a tensor depends on the number of samples.

    The comparison of outputs shows whether its content depends on the samples.
    """
    values = (each.values.get(key) for each in (one, other))
    shapes = [
        value[0].shape
        for value in values
        if isinstance(value, tuple) and value and isinstance(value[0], (torch.Tensor, Large))
    ]
    return len(shapes) == 2 and shapes[0] != shapes[1]


def _is_plain(snapshot: Snapshot, key: Key) -> bool:
    return isinstance(snapshot.values.get(key, ABSENT), (*PLAIN, Absent))


def _state_after(module: nn.Module, part: Batch, forward: Forward) -> Snapshot:
    args, kwargs = part.call(part.leaves)
    with torch.no_grad():
        forward(*args, **kwargs)
    return Snapshot(module, copies=False)


def _remembered_text(name: str) -> str:
    if name.startswith("buffer"):
        return f"the model changes its {name} in every forward"
    return f"the model keeps something of a forward for later: its {name}"


class _Saved:
    """Holds a tensor that a graph has saved."""

    __slots__ = ("__weakref__", "content")

    def __init__(self, content: Any) -> None:
        self.content = content


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


def refuse_escapes(
    module: nn.Module, part: Batch, forward: Forward, hooks: saved_tensors_hooks | None = None
) -> set[torch.dtype]:
    """Run ``forward`` once with a graph; raise ``Refused`` if a part of it stays alive.

    Returns the data types that it computes in. ``hooks`` store autograd's saved tensors.
    """
    saved: list[weakref.ref[_Saved]] = []

    def pack(tensor: torch.Tensor) -> _Saved:
        tensor = tensor.detach()  # the tensor itself would refer to its graph: a cycle
        holder = _Saved(tensor if hooks is None else hooks.pack_hook(tensor))
        saved.append(weakref.ref(holder))
        return holder

    def unpack(holder: _Saved) -> torch.Tensor:
        return holder.content if hooks is None else hooks.unpack_hook(holder.content)

    args, kwargs = part.call(part.leaves)
    torch.clear_autocast_cache()  # casts cached without a graph would detach the weights
    witness = Witness()
    with saved_tensors_hooks(pack, unpack), witness:
        output = forward(*args, **kwargs)
    own = {id(parameter) for parameter in (*module.parameters(), *part.leaves)}
    # Some of transformers' models create a tensor from a waveform that requires gradients. It is
    # freed with the graph, so nobody can read its gradient.
    reached = differentiated(tree_leaves(output))
    foreign = [weakref.ref(tensor) for tensor in reached if id(tensor) not in own]
    del reached
    del output
    torch.clear_autocast_cache()
    _drop_graphs_of_weights(module)
    known = _strided(list(tensors_of(module)))
    there: list[weakref.ref[Any]] = [*saved, *foreign]
    if any(each() is not None for each in there) or witness.still_alive(known):
        gc.collect()
    if any(each() is not None for each in saved) or witness.still_alive(known):
        raise Refused("the model keeps a part of its forward (an attribute, a hook) for later")
    if any(each() is not None for each in foreign):
        raise Refused("the model uses tensors that need gradients and are not its parameters")
    return witness.dtypes


def _drop_graphs_of_weights(module: nn.Module) -> None:
    """Detach the weights that torch's own hooks recompute before each forward.

    ``torch.nn.utils.weight_norm`` and ``spectral_norm`` store them as plain attributes.
    """
    for each in module.modules():
        for hook in each._forward_pre_hooks.values():
            if isinstance(hook, (WeightNorm, SpectralNorm)):
                vars(each)[hook.name] = vars(each)[hook.name].detach()
