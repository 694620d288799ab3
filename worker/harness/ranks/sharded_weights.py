"""Shards weights, gradients and optimizer state of a root, by torch's ``fully_shard`` (FSDP2).

The root is sharded in its first training call, once the layout of the call is verified. A model
that is too large for the device is paged until then, and is sharded block by block. Each
repeated block is gathered for its own forward and backward, and the rest of the root for those of
the root. The parameters that the script holds are replaced by sharded ones. The hooks of FSDP are
wrappers around calls here, so that the script finds its modules as it made them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from autofit.exceptions import Refused
from autofit.strategies import SHARDING
from autofit.strategies.base import Forward, Root, Shards, Undo, Wrapper
from autofit.strategies.inspection.blocks import repeated_blocks
from autofit.strategies.support.memory import on_accelerator
from autofit.worker.harness.batch.layout import Batch, Layout
from autofit.worker.harness.ranks.paged_parameters import PagedParameters, paged_parameters
from autofit.worker.harness.ranks.references import drop_values, replace_parameters
from autofit.worker.harness.ranks.shared_call import (
    DividedCalls,
    SharedCall,
    refuse_unknown_tensors,
)
from autofit.worker.harness.ranks.whole_tensors import WholeTensors
from autofit.worker.harness.torch_state.graph import differentiated
from autofit.worker.harness.torch_state.modules import fsdp_groups, hooks_of_script, is_paged
from autofit.worker.harness.torch_state.pytree import flatten

OTHER_PARAMETERS = "the script has replaced or added parameters of the model"
COMPILED = "the script compiles functions that may use sharded parameters"
HOOKS = "the script has hooks on parameters"
OTHER_WAY = "the ranks called the model's blocks in different orders"
MEMBERS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params", STATE_KEY, REGISTRY_KEY)
"""Attributes that ``fully_shard`` sets on modules and needs for the compiler only."""


class ShardedWeights:
    """The sharded weights of one root. They stay sharded for the life of the process."""

    def __init__(self, owner: Root, whole: WholeTensors, shards: Shards) -> None:
        self._owner = owner
        self._whole = whole
        self._shards = shards
        self._states: dict[nn.Module, Any] = {}
        """FSDP's state of each module that is gathered by itself."""
        self._parameters: list[weakref.ref[torch.Tensor]] = []
        self._versions: dict[nn.Module, tuple[int, ...]] = {}
        """The versions of each module's weights when they were gathered."""
        self._called: list[int] = []
        """The blocks of the present forward, by their number, in the order of their calls."""
        self._forwards = 0
        """Forwards of the root that run now. A checkpoint that runs a block again is none."""
        self._undos: list[Undo] = []

    @property
    def active(self) -> bool:
        """Whether the weights are sharded now."""
        return bool(self._states)

    def start(self, shared: DividedCalls) -> Undo:
        """Run the calls of ``shared`` with sharded weights from now on."""
        shared.sharded = self
        self._undos = [self._owner.around_forward(self._around_root)]
        self._wrap_blocks()

        def undo() -> None:
            shared.sharded = None
            while self._undos:
                self._undos.pop()()

        return undo

    # --- calls -----------------------------------------------------------------------------

    def call(
        self,
        shared: DividedCalls,
        run: Forward,
        batch: Batch,
        layout: Layout | None,
        *,
        compared: bool,
    ) -> Any:
        """Run a training call: divided by ``layout``, or whole on every rank."""
        self._whole.check()
        if shared.seams.compiles_functions:
            raise Refused(COMPILED, SHARDING)
        pages = paged_parameters(shared.seams)
        if not self.active:
            self._shard(self._owner.module, pages)
        if pages is not None:  # a copy may have been paged, on which a call was verified
            pages.settle()
        self._refuse_other_parameters()
        if layout is not None:
            make = partial(ShardedCall, self)
            found = shared.divided(run, batch, layout, compared=compared, make=make)
            if isinstance(found, tuple):
                return found[0]
            if found:
                shared.tell_whole(found)
        return self._run_whole(shared.group.size, run, batch)

    def evaluate(self, run: Forward, args: Any, kwargs: Any) -> Any:
        """Run a call without gradients, whole on every rank."""
        self._whole.check()
        if not torch.is_inference_mode_enabled():
            return run(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():  # gathered weights serve training too
            return run(*args, **kwargs)

    def _run_whole(self, size: int, run: Forward, batch: Batch) -> Any:
        """Run the whole batch on every rank; the sum of equal gradients is divided again."""
        if size == 1:
            args, kwargs = batch.call(batch.leaves)
            return run(*args, **kwargs)
        leaves = [_scaled(each, size) for each in batch.leaves]
        args, kwargs = batch.call(leaves)
        outputs, spec = flatten(run(*args, **kwargs))
        refuse_unknown_tensors(outputs, (*self.gathered(), *differentiated(batch.leaves)))
        return tree_unflatten([_scaled(each, 1 / size) for each in outputs], spec)

    def _around_root(self, run: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return run(*args, **kwargs)
            self._called.clear()
            self._forwards += 1
            try:
                with self._whole.in_model() if torch.is_grad_enabled() else nullcontext():
                    return self._gathered(self._owner.module, run, args, kwargs)
            finally:
                self._forwards -= 1

        return forward

    def _around_block(self, block: nn.Module, number: int) -> Wrapper:
        reference = weakref.ref(block)

        def wrapper(run: Forward) -> Forward:
            def forward(*args: Any, **kwargs: Any) -> Any:
                module = reference()
                assert module is not None, "a block is alive while it is called"
                self._called.append(number)
                return self._gathered(module, run, args, kwargs)

            return forward

        return wrapper

    def _gathered(self, module: nn.Module, run: Forward, args: Any, kwargs: Any) -> Any:
        """Run a call while the weights of ``module`` are gathered, as FSDP's hooks would."""
        state = self._states[module]
        with self._whole.by_parts():
            self._drop_outdated(module)
            args, kwargs = state._pre_forward(module, args, kwargs)
            self._versions.setdefault(module, _versions(state))
        for group in fsdp_groups(state):
            _show_gathered(group)
        try:
            output = run(*args, **kwargs)
        finally:
            _show_sharded(state)
        with self._whole.by_parts():
            output = state._post_forward(module, args, output)
            if self._forwards and self._shards.gathers_twice:
                # FSDP keeps what is gathered in a backward, because a checkpoint might run there.
                # But a chunk runs its whole forward there, and would gather the whole model.
                for group in fsdp_groups(state):
                    group.reshard()
        return output

    def _drop_outdated(self, module: nn.Module) -> None:
        """Drop gathered weights of ``module`` that were kept, if the weights have changed since.

        They are kept if no backward came after their forward, which would have dropped them.
        """
        state = self._states[module]
        groups = fsdp_groups(state)
        if not any(group.is_unsharded for group in groups):
            self._versions.pop(module, None)
        elif self._versions.get(module) != _versions(state):
            for group in groups:
                group.reshard()
            self._versions.pop(module, None)

    def abandon_call(self) -> None:
        """Forget the forward or backward that has failed, so that the call can run again.

        Nothing of it is left: no gathered weights, and no gradient that is not yet summed.
        """
        root = self._states[self._owner.module]
        root._device_handle.synchronize()
        for state in self._states.values():
            state._training_state = TrainingState.IDLE
            for group in fsdp_groups(state):
                group._training_state = TrainingState.IDLE
                group._all_gather_result = None
                group._post_forward_indices.clear()
                for each in group.fsdp_params:
                    if hasattr(each, "_unsharded_param"):
                        each._unsharded_param.grad = None
                    each.to_sharded()
                group.reshard()
        root._comm_ctx.post_forward_order.clear()
        root._state_ctx.iter_forward_root = None
        root._state_ctx.post_backward_final_callback_queued = False

    def called(self) -> tuple[int, ...]:
        """Return the blocks that the last forward has called, in order."""
        return tuple(self._called)

    def gathered(self) -> list[torch.Tensor]:
        """Return the parameters that a forward uses in place of the sharded ones."""
        groups = (group for state in self._states.values() for group in fsdp_groups(state))
        return [each._unsharded_param for group in groups for each in group.fsdp_params]

    def _refuse_other_parameters(self) -> None:
        now = list(self._owner.module.parameters())
        known = [each() for each in self._parameters]
        if len(now) != len(known) or any(a is not b for a, b in zip(now, known, strict=True)):
            raise Refused(OTHER_PARAMETERS, SHARDING)
        if any(map(hooks_of_script, now)):
            raise Refused(HOOKS, SHARDING)

    # --- sharding --------------------------------------------------------------------------

    def _shard(self, module: nn.Module, pages: PagedParameters | None) -> None:
        """Shard the weights of ``module``, and put the new parameters wherever the old ones are."""
        before = list(module.named_parameters(remove_duplicate=False))
        blocks = _blocks(module)
        for each in (*blocks, module):
            _refuse_what_is_not_sharded(each)
        device = before[0][1].device
        mesh = self._whole.mesh(device, self._shards.groups)
        policy = OffloadPolicy()
        if self._shards.on_host:
            policy = CPUOffloadPolicy(pin_memory=on_accelerator(device))
        precision = MixedPrecisionPolicy()
        if self._shards.half:  # gradients are summed as they are kept
            precision = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16,
                reduce_dtype=before[0][1].dtype,
                cast_forward_inputs=False,
            )
        classes = {each: type(each) for each in (*blocks, module)}
        gradients = {old: old.grad for _, old in before if old.grad is not None}
        paged = is_paged(module)
        with self._whole.by_parts():
            for each in (*blocks, module):
                own = [old for old in each.parameters() if not isinstance(old, DTensor)]
                with pages.there(own) if pages is not None else nullcontext():
                    made = fully_shard(
                        each,
                        mesh=mesh,
                        reshard_after_forward=self._shards.gathers_twice,
                        mp_policy=precision,
                        offload_policy=policy,
                    )
                assert isinstance(made, FSDPModule)
                if mesh.size() > 1:  # one rank alone has no mean, and would divide a copy
                    made.set_gradient_divide_factor(1.0)
                made.set_force_sum_reduction_for_comms(True)
                if paged:
                    drop_values(own)
        for each, cls in classes.items():
            state = each._get_fsdp_state()  # type: ignore[operator]
            self._states[each] = state
            each.__class__ = cls
        with self._whole.by_parts():
            self._states[module]._lazy_init()
        for state in self._states.values():
            _remove_hooks(state)
            for group in fsdp_groups(state):
                _show_in_backward(group)
                if mesh.size() == 1:
                    _free_sums(group)
        for each in module.modules():
            for name in MEMBERS:
                each.__dict__.pop(name, None)
        after = dict(module.named_parameters(remove_duplicate=False))
        new = {old: after[name] for name, old in before if old is not after[name]}
        for old, gradient in gradients.items():
            new[old].grad = self._whole.part(gradient, new[old])
        del before, gradients
        self._parameters = [weakref.ref(each) for each in module.parameters()]
        replace_parameters(new)
        self._wrap_blocks()

    def _wrap_blocks(self) -> None:
        blocks = [each for each in self._states if each is not self._owner.module]
        for number, block in enumerate(blocks):
            self._undos.append(self._owner.around_call(block, self._around_block(block, number)))


class ShardedCall(SharedCall):
    """A divided call. FSDP sums its gradients, and adds each rank's part to ``.grad``."""

    def __init__(
        self,
        weights: ShardedWeights,
        root: DividedCalls,
        run: Forward,
        batch: Batch,
        layout: Layout,
        *,
        compared: bool,
    ) -> None:
        super().__init__(root, run, batch, layout, compared=compared)
        self._weights = weights
        self.parameters = [nn.Parameter(torch.empty(0))]  # autograd follows a call by its inputs

    def _trained(self) -> Iterable[torch.Tensor]:
        """Return the gathered weights, with which the forward has run."""
        return self._weights.gathered()

    def _all_parameters(self) -> Iterator[torch.Tensor]:
        yield from self._weights.gathered()

    def _forward(self) -> tuple[list[Any], TreeSpec]:
        """Return the outputs of this rank's slice. All ranks must take the same way."""
        found = super()._forward()
        group = self._root.group
        if len(set(group.meet(f"the blocks of {self._root.name}", self._weights.called()))) > 1:
            raise Refused(OTHER_WAY, SHARDING)
        return found


class _Scaled(torch.autograd.Function):
    """Passes a tensor on, and multiplies its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        """Return the tensor."""
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient times the factor."""
        return gradient * ctx.factor, None


def _scaled(value: Any, factor: float) -> Any:
    if isinstance(value, torch.Tensor) and value.requires_grad:
        return _Scaled.apply(value, factor)  # type: ignore[no-untyped-call]
    return value


def _parameters(state: Any) -> list[Any]:
    return [each for group in fsdp_groups(state) for each in group.fsdp_params]


def _versions(state: Any) -> tuple[int, ...]:
    """Return numbers that change if the sharded weights change."""
    return tuple(each.sharded_param._version for each in _parameters(state))


def _show_gathered(group: Any) -> None:
    """Let a module use its gathered weights, if they are gathered."""
    for each in group.fsdp_params if group.is_unsharded else ():
        each._setattr_on_modules(each._unsharded_param)


def _show_in_backward(group: Any) -> None:
    """Let a module use its gathered weights in backward, where a checkpoint runs it again."""
    plain = group.pre_backward

    def pre_backward(*args: Any) -> None:
        plain(*args)
        _show_gathered(group)

    group.pre_backward = pre_backward


def _free_sums(group: Any) -> None:
    """Free the gradients of a module, as they were before the sum, when its backward has ended.

    FSDP keeps them during the next module's backward, so that it need not wait for the message. One
    rank alone sends none.
    """
    plain = group.post_backward

    def post_backward(*args: Any) -> None:
        plain(*args)
        context = group.comm_ctx
        if hasattr(context, "reduce_scatter_states"):
            kept, context.reduce_scatter_states = context.reduce_scatter_states, []
        else:  # before torch 2.13
            kept, context.reduce_scatter_state = [context.reduce_scatter_state], None
        for each in kept:
            if each is not None and each.event is not None:
                group.device_handle.current_stream().wait_event(each.event)

    group.post_backward = post_backward


def _show_sharded(state: Any) -> None:
    """Let the script see the sharded weights, even if the gathered ones are kept."""
    for each in _parameters(state):
        each._setattr_on_modules(each.sharded_param)


def _remove_hooks(state: Any) -> None:
    """Remove what FSDP has registered on modules: its work is done around their calls."""
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    for group in fsdp_groups(state):
        for handle in (
            *group._module_to_pre_save_state_dict_hook_handle.values(),
            *group._module_to_pre_load_state_dict_hook_handle.values(),
            *(each._post_load_hook_handle for each in group.fsdp_params),
        ):
            handle.remove()


def _blocks(module: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of ``module`` whose parameters no other module has."""
    users: dict[nn.Parameter, int] = {}
    for each in module.modules():
        for parameter in each._parameters.values():
            if parameter is not None:
                users[parameter] = users.get(parameter, 0) + 1
    return [
        block
        for block in repeated_blocks(module)
        if block is not module and all(users[each] == 1 for each in block.parameters())
    ]


def _refuse_what_is_not_sharded(module: nn.Module) -> None:
    parameters = list(module.parameters())
    reasons: dict[str, Callable[[torch.Tensor], bool]] = {
        "a part of the model is sharded already": lambda each: isinstance(each, DTensor),
        "a parameter has a class of its own": lambda each: type(each) is not nn.Parameter,
        "a parameter is a single number": lambda each: not each.dim(),
        "a parameter is not contiguous in memory": lambda each: not each.is_contiguous(),
        HOOKS: lambda each: bool(hooks_of_script(each)),
    }
    for reason, holds in reasons.items():
        if any(holds(each) for each in parameters):
            raise Refused(reason, SHARDING)
    if len({each.dtype for each in parameters}) > 1:
        raise Refused("the model's parameters have different types", SHARDING)
    embeddings = (e for e in module.modules() if isinstance(e, nn.Embedding | nn.EmbeddingBag))
    if any(each.sparse for each in embeddings):
        raise Refused("an embedding has sparse gradients, which are not sharded", SHARDING)
