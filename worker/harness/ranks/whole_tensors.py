"""Shows the script whole tensors where its weights are sharded.

The parameters of a sharded model are ``DTensor``s, and so are their gradients. Each rank has a part
of the values. Outside the model, backward passes and optimizer steps, a function of torch gets the
whole values in place of a ``DTensor``, and returns plain tensors. So printed numbers, averages of
weights and norms are those of one process. A change in place is stored in the parts.
Optimizers step the parts; the script sees and loads whole states.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from autofit.exceptions import Refused
from autofit.strategies import SHARDING
from autofit.strategies.base import OptimizerHandle, Undo
from autofit.strategies.support import optimizers
from autofit.worker.harness.patching.observers import Seams
from autofit.worker.harness.ranks.group import RankGroup
from autofit.worker.harness.ranks.paged_parameters import paged_parameters
from autofit.worker.harness.ranks.sharded_state import SCALED, State, why_not
from autofit.worker.harness.torch_state.undo import together

ATTRIBUTES_OF_PLACE = frozenset({"device", "is_cuda", "is_cpu"})
"""Attributes of a tensor that tell where it is, which may be the host."""
ATTRIBUTES_OF_VALUES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Attributes of a tensor that show its values; others do not need them."""
WITHOUT_VALUES = frozenset(
    (
        "detach",
        "detach_",
        "requires_grad_",
        "retain_grad",
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "element_size",
        "stride",
        "get_device",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_inference",
        "is_signed",
        "__len__",
        "__hash__",
    )
)
"""Functions that a ``DTensor`` answers without the values of other ranks."""
OPERATORS = frozenset(("__iadd__", "__isub__", "__imul__", "__itruediv__"))
"""Operators that change each element of a tensor by itself."""
ELEMENTWISE = OPERATORS | frozenset(
    (
        "zero_",
        "fill_",
        "mul_",
        "add_",
        "sub_",
        "div_",
        "clamp_",
        "clamp_min_",
        "clamp_max_",
        "neg_",
        "copy_",
        "lerp_",
        "addcmul_",
        "addcdiv_",
        "sqrt_",
        "square_",
        "abs_",
    )
)
"""Functions that change each element of a tensor by itself."""
IN_PLACE = OPERATORS | frozenset(("__setitem__", "__ipow__"))
"""Functions that change their first argument, though their names do not end in one underscore."""
OF_MEMORY = frozenset(
    (
        "data_ptr",
        "untyped_storage",
        "storage",
        "set_",
        "resize_",
        "resize_as_",
        "apply_",
        "map_",
        "share_memory_",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "grad",
    )
)
"""Functions that need a plain tensor in the memory of one process."""
PART_CHANGED = "the script changes a part of a parameter in place, but the parameters are sharded"

_held: WeakKeyDictionary[RankGroup, WholeTensors] = WeakKeyDictionary()


def whole_tensors(group: RankGroup, seams: Seams) -> WholeTensors:
    """Return the one object of the process, which works from the first call on."""
    if group not in _held:
        _held[group] = WholeTensors(group, seams)
    return _held[group]


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return all values of a tensor that a plan has sharded; all ranks must ask for them.

    Returns any other tensor as it is, also one that the script itself has sharded.
    """
    held = next(iter(_held.values()), None)
    return held.whole(tensor.detach()) if held and isinstance(tensor, DTensor) else tensor


class WholeTensors:
    """Replaces ``DTensor``s by whole tensors in what the script computes."""

    def __init__(self, group: RankGroup, seams: Seams) -> None:
        self._group = group
        self._seams = seams
        self._uses = 0
        """Above zero while torch itself works on the parts."""
        self._in_model = 0
        """Above zero while the forward of a sharded model runs with gradients."""
        self._last: list[tuple[torch.Tensor, int]] = []
        """What the last function has made that shares memory with a whole tensor."""
        self._views: list[tuple[weakref.ref[torch.Tensor], int]] = []
        """The same of functions before, as far as the script still has it."""
        self._mesh: DeviceMesh | None = None
        patches = seams.patches
        patches.set(DTensor, "__torch_function__", classmethod(self._called))
        patches.wrap(DTensor, "__repr__", self._representation)
        for owner, name in (
            (clip_grad, "_get_total_norm"),
            (clip_grad, "_clip_grads_with_norm_"),
            (torch.amp.GradScaler, "_unscale_grads_"),
        ):
            patches.wrap(owner, name, self._by_torch)
        DTensor._op_dispatcher._allow_implicit_replication = True

    def mesh(self, device: torch.device, groups: int = 1) -> DeviceMesh:
        """Return the ranks as torch's sharding needs them, in so many groups that hold the same."""
        if self._mesh is None:
            world = dist.group.WORLD
            assert world is not None, "the ranks are connected"
            if groups == 1:
                self._mesh = DeviceMesh.from_group(world, device.type)
            else:
                self._mesh = init_device_mesh(
                    device.type,
                    (groups, self._group.size // groups),
                    mesh_dim_names=("replicate", "shard"),
                )
        return self._mesh

    @contextmanager
    def by_parts(self) -> Iterator[None]:
        """Return a context in which torch's functions work on the parts."""
        self._uses += 1
        try:
            yield
        finally:
            self._uses -= 1

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Return a context for the forward of a sharded model."""
        self._in_model += 1
        try:
            yield
        finally:
            self._in_model -= 1

    def whole(self, tensor: Any) -> torch.Tensor:
        """Return all values of a tensor on its device; all ranks must ask for them."""
        return self._values(tensor, tensor.device_mesh.device_type)

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return all values of a tensor in host memory, because the device may have no room."""
        return self._values(tensor.detach(), "cpu")

    def _values(self, tensor: Any, device: str) -> torch.Tensor:
        self._group.meet("the values of a sharded tensor")
        with self.by_parts(), _followed():
            found: torch.Tensor = tensor.full_tensor()
            own = found.data_ptr() == tensor.to_local().data_ptr()  # the only rank has all of it
            padded = found.untyped_storage().nbytes() > found.nbytes  # a file would be larger
            return (found.clone() if padded or own else found).to(device)

    def seen(self, parameter: torch.Tensor, *, here: bool) -> torch.Tensor | None:
        """Return what the script should see of a sharded parameter, ``None`` of any other.

        ``here``: on its device.
        """
        if not isinstance(parameter, DTensor):
            return None
        self.check()
        return self.whole(parameter.detach()) if here else self.on_host(parameter)

    def part(self, values: torch.Tensor, like: Any) -> DTensor:
        """Return the values of a whole tensor, sharded as ``like`` is."""
        with self.by_parts(), torch.no_grad():
            mesh = like.device_mesh
            values = values.detach().to(mesh.device_type)
            part = distribute_tensor(values, mesh, like.placements, src_data_rank=None)
            return part.to(like.device)  # type: ignore[return-value]

    def check(self) -> None:
        """Raise ``Refused`` if the script has changed a view of a whole tensor in place."""
        views = [(view, version) for ref, version in self._views if (view := ref()) is not None]
        if any(tensor._version != version for tensor, version in (*self._last, *views)):
            raise Refused(PART_CHANGED, SHARDING)
        self._views = [(weakref.ref(tensor), version) for tensor, version in (*self._last, *views)]
        self._last = []

    # --- what the script calls -------------------------------------------------------------

    def _called(self, cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch that has a ``DTensor`` among its arguments."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            name = func.__name__
            if name in ("__get__", "__set__", "__delete__"):
                return self._attribute(func, name, args)
            if self._uses or name in WITHOUT_VALUES:
                return func(*args, **kwargs)
            if name in ("__deepcopy__", "__reduce_ex__"):
                return self._copied(name, *args)
            if self._in_model and torch.is_grad_enabled():
                raise Refused("a part of the model uses the weights of another part", SHARDING)
            if self._seams.inside:
                return func(*args, **kwargs)
            self.check()
            if name in OF_MEMORY:
                raise Refused(f"the script calls {name} for a parameter", SHARDING)
            if name in IN_PLACE or (name.endswith("_") and not name.endswith("__")):
                return self._in_place(func, name, args, kwargs)
            return self._computed(func, args, kwargs)

    def _attribute(self, func: Any, kind: str, args: Any) -> Any:
        name, tensor = func.__self__.__name__, args[0]
        outside = kind == "__get__" and not self._uses
        if outside and name in ATTRIBUTES_OF_VALUES:
            return self._computed(func, args, {})
        if outside and name in ATTRIBUTES_OF_PLACE and not self._seams.inside:
            return func(torch.empty(0, device=tensor.device_mesh.device_type))
        if kind == "__set__" and isinstance(tensor, DTensor):
            value = args[1]
            if name == "data" and not (self._uses or self._seams.inside):
                return self._set_data(tensor, value)
            if name == "grad" and isinstance(value, torch.Tensor) and type(value) is not DTensor:
                return func(tensor, self.part(value, tensor))
        return func(*args)

    def _set_data(self, tensor: DTensor, value: torch.Tensor) -> None:
        """Store the values that the script gives a parameter, as ``Module.to`` does."""
        if (value.shape, value.dtype, value.device) != (tensor.shape, tensor.dtype, tensor.device):
            raise Refused("the script changes the type of a parameter", SHARDING)
        with torch.no_grad():
            tensor._local_tensor.copy_(self.part(value, tensor)._local_tensor)
        self._last.append((value, value._version))  # in one process they share memory from now on

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a function of the whole values."""
        if any(isinstance(each, DTensor) for each in tree_leaves(kwargs.get("out"))):
            raise Refused("the script stores a result in a parameter (out=)", SHARDING)
        known: dict[int, torch.Tensor] = {}
        args, kwargs = self._replaced((args, kwargs), known)
        result = func(*args, **kwargs)
        memory = {each.untyped_storage().data_ptr() for each in known.values()}
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and _memory(each) in memory:
                self._last.append((each, each._version))
        return result

    def _in_place(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run a function that changes its first argument."""
        target = args[0] if args else next(iter(kwargs.values()))
        leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        changed = [x for x in tree_leaves(target) if isinstance(x, torch.Tensor)]
        if not any(isinstance(each, DTensor) for each in changed):
            others = self._replaced((args[1:], kwargs), {})
            return func(target, *others[0], **others[1])
        by_parts = all(isinstance(each, DTensor) or not each.dim() for each in leaves)
        if isinstance(target, list | tuple):
            if not by_parts:
                raise Refused(f"the script calls {name} for parameters and others", SHARDING)
            return func(*args, **kwargs)
        followed = torch.is_grad_enabled() and target.is_leaf and target.requires_grad
        fails = followed and func is getattr(torch.Tensor, name, None)
        if fails or (by_parts and name in ELEMENTWISE):
            return func(*args, **kwargs)
        with torch.no_grad():
            values = self.whole(target)
            known = {id(target): values}
            func(*self._replaced(args, known), **self._replaced(kwargs, known))
            target._local_tensor.copy_(self.part(values, target)._local_tensor)
        return target

    def _replaced(self, value: Any, known: dict[int, torch.Tensor]) -> Any:
        """Return ``value`` with whole tensors; ``known``: those that are there already, by id."""

        def one(each: Any) -> Any:
            if not isinstance(each, DTensor):
                return each
            if id(each) not in known:
                known[id(each)] = self.whole(each)
            return known[id(each)]

        return tree_map(one, value)

    def _copied(self, name: str, tensor: DTensor, other: Any) -> Any:
        """Return a copy or a pickle of a tensor, which one process could have made."""
        values = self.whole(tensor.detach())
        if isinstance(tensor, nn.Parameter):
            values = nn.Parameter(values, tensor.requires_grad)
        if name == "__reduce_ex__":
            return values.__reduce_ex__(other)
        if (pages := paged_parameters(self._seams)) is not None:
            pages.add(values)
        other[id(tensor)] = values
        return values

    def _representation(self, plain: Callable[..., str]) -> Callable[..., str]:
        def show(tensor: DTensor, *args: Any, **kwargs: Any) -> str:
            if self._uses or self._seams.inside:
                return plain(tensor, *args, **kwargs)
            values = self.whole(tensor.detach())
            return repr(nn.Parameter(values) if isinstance(tensor, nn.Parameter) else values)

        return show

    def _by_torch(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Let a function of torch work on parts; the script gets a whole result."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.by_parts():
                result = plain(*args, **kwargs)
            return self.whole(result) if isinstance(result, DTensor) else result

        return run


@contextmanager
def _followed() -> Iterator[None]:
    """Let tensors count their changes, also in inference mode."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _memory(tensor: torch.Tensor) -> int | None:
    strided = tensor.layout is torch.strided and type(tensor) in (torch.Tensor, nn.Parameter)
    return tensor.untyped_storage().data_ptr() if strided else None


def follow_weights(handle: OptimizerHandle, whole: WholeTensors) -> Undo:
    """Let an optimizer step sharded parameters from now on; raise ``Refused`` if it cannot."""
    optimizer = handle.optimizer
    if reason := why_not(optimizer, optimizers.ELEMENTWISE):
        raise Refused(reason)

    def step(optimizer: Any, plain: Callable[[], None]) -> None:
        if getattr(optimizer, "grad_scale", None) is not None:
            raise Refused(SCALED)
        whole.check()
        _keep_own_parts(optimizer, whole)
        with whole.by_parts():
            plain()

    def show(parameter: Any, state: State) -> State:
        return {
            name: whole.on_host(value) if isinstance(value, DTensor) else value
            for name, value in state.items()
        }

    hook = optimizer.register_load_state_dict_post_hook(lambda each: _keep_own_parts(each, whole))
    return together(hook.remove, handle.show_state(show), handle.around_step(step))


def _keep_own_parts(optimizer: Optimizer, whole: WholeTensors) -> None:
    """Keep this rank's part of each state that was loaded, or that was there before."""
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, DTensor):
            continue
        for name, value in state.items():
            plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
            if plain and value.dim() and value.shape == parameter.shape:
                state[name] = whole.part(value, parameter)
