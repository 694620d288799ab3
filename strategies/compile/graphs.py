"""Launches the kernels of a block as one CUDA graph: one of its forward, one of its backward.

A block's first call with arguments of some shapes records both graphs, later calls replay them. The
kernels and the random draws are those of the plain block, so the results are equal to the bit. Only
the time to launch the kernels is saved.

A graph reads and writes fixed memory, so arguments and results are copied. That memory also holds
what backward needs. So a block must not be replayed again before its backward: a second call then
runs the block plainly.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from autofit.exceptions import Refused
from autofit.strategies.base import Forward
from autofit.strategies.inspection import tf32

NAME = "compile"
"""The strategy that these refusals concern."""
CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)
"""Types of arguments that a graph may treat as constants."""
MOST_KINDS = 2
"""Recordings of one block: the last chunk of a batch may be smaller than the others."""
MOST_NEW = 8
"""Calls of one block in a row of which each is of a new kind: a check has some."""
VARIES = "a CUDA graph needs fixed shapes and settings, and those of the model keep changing"


class GraphMemory:
    """What the recordings of a model share: memory for their backwards, and the stream of records.

    All backwards may use the same memory, in any order: the recordings hold their gradients, and
    nothing else of them is needed later. Each forward has memory of its own, because its backward
    reads from it. The allocator shares memory within a stream only.
    """

    def __init__(self) -> None:
        self.of_backwards = torch.cuda.graph_pool_handle()
        self.stream = _stream_of_records(torch.cuda.current_device())
        self.recording = False
        """A block is being recorded; its calls run plainly meanwhile."""

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record a block in this context."""
        self.recording = True
        try:
            with _without_cached_casts():
                yield
        except BaseException:
            _end_capture_of_draws()
            raise
        finally:
            self.recording = False


@cache
def _stream_of_records(device: int) -> torch.cuda.Stream:
    """Return the same stream at each call: cuBLAS has a workspace of 64 MiB for each one."""
    return torch.cuda.Stream(device)


class GraphedBlock:
    """Records and replays the calls of one block."""

    def __init__(
        self,
        block: nn.Module,
        memory: GraphMemory,
        changes: Callable[[], object],
        new: Callable[[], None] = lambda: None,
    ) -> None:
        """``changes`` returns another value once the block has changed in more than its weights.

        ``new`` is called before each recording, which takes time.
        """
        self._block = weakref.ref(block)
        self._memory = memory
        self._changes = changes
        self._new = new
        self._recordings: OrderedDict[object, _Recording] = OrderedDict()
        self._new_in_a_row = 0

    def clear(self) -> None:
        """Free the graphs and their memory."""
        self._recordings.clear()

    def around(self, forward: Forward) -> Forward:
        """Return ``forward``, replayed where possible."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._memory.recording or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            leaves, spec = tree_flatten((args, kwargs))
            kind = (spec, self._changes(), _settings(), tuple(map(_described, leaves)))
            recording = self._recordings.get(kind)
            if recording is None:
                recording = self._recordings[kind] = self._record(leaves, spec)
            else:
                self._new_in_a_row = 0
            return forward(*args, **kwargs) if recording.waits else recording(leaves)

        return call

    def _record(self, leaves: list[Any], spec: TreeSpec) -> _Recording:
        self._new_in_a_row += 1
        if self._new_in_a_row > MOST_NEW:
            raise Refused(VARIES, NAME)
        if len(self._recordings) == MOST_KINDS:
            self._recordings.popitem(last=False)
        block = self._block()
        assert block is not None, "a block outlives its calls"
        self._new()
        try:
            with self._memory.recorded():
                return _Recording(block, leaves, spec, self._memory)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            first = error.__context__ or error  # the end of the recording fails too
            line = str(first).partition("\n")[0]
            raise Refused(f"a block cannot run as a CUDA graph: {line}", NAME) from error


class _Recording:
    """The two graphs of one kind of call, and the memory that they read and write."""

    def __init__(
        self, block: nn.Module, leaves: list[Any], spec: TreeSpec, memory: GraphMemory
    ) -> None:
        """Record a call. Raises ``Refused`` or ``RuntimeError`` if it is impossible.

        It differentiates for aliases of the parameters: autograd would wait for the stream of the
        parameters' own nodes, which is not recorded.
        """
        self._parameters = [p for p in block.parameters() if p.requires_grad]
        hooks = (p._backward_hooks for p in self._parameters)
        if any(hooks) or any(map(_has_hooks, block.modules())):
            raise Refused("a hook of the script would not run in a CUDA graph", NAME)
        self._held = [*block.parameters(), *block.buffers()]
        self._addresses = [each.data_ptr() for each in self._held]
        self._positions = [i for i, each in enumerate(leaves) if isinstance(each, torch.Tensor)]
        inputs = [leaves[i] for i in self._positions]
        self._inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        given = list(leaves)
        for position, tensor in zip(self._positions, self._inputs, strict=True):
            given[position] = tensor
        args, kwargs = tree_unflatten(given, spec)
        aliases = {name: p.detach() for name, p in block.named_parameters()}
        trained = [
            aliases[n].requires_grad_() for n, p in block.named_parameters() if p.requires_grad
        ]

        def run() -> tuple[list[Any], TreeSpec]:
            return tree_flatten(functional_call(block, aliases, args, kwargs))

        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        wanted = [*(x for x in self._inputs if x.requires_grad), *trained]
        record: Any = {
            "stream": memory.stream,
            "capture_error_mode": "thread_local",  # a loader's thread may pin memory meanwhile
        }
        with _unnoticed(block), torch.cuda.stream(memory.stream):
            self._differentiate(run()[0], wanted)
        with torch.cuda.graph(self._forward, **record):
            self._outputs, self._spec = run()
        self._cotangents = [torch.empty_like(each) for each in _differentiable(self._outputs)]
        with torch.cuda.graph(self._backward, pool=memory.of_backwards, **record):
            found = iter(self._differentiate(self._outputs, wanted, self._cotangents))
        self._gradients = [
            next(found) if x.requires_grad else None for x in (*self._inputs, *self._parameters)
        ]
        self._latest: Callable[[], object] = lambda: None
        """The latest call, as long as its autograd graph exists."""
        self._answered = True
        """Its backward has run."""

    @staticmethod
    def _differentiate(
        outputs: list[Any], wanted: list[torch.Tensor], cotangents: list[torch.Tensor] | None = None
    ) -> Sequence[torch.Tensor | None]:
        outputs = _differentiable(outputs)
        if not (outputs and wanted):
            return [None] * len(wanted)
        return torch.autograd.grad(
            outputs,
            wanted,
            cotangents or [torch.ones_like(each) for each in outputs],
            retain_graph=cotangents is not None,
            allow_unused=True,
        )

    @property
    def waits(self) -> bool:
        """Whether the memory holds what the backward of an earlier call needs.

        Also ``True`` if a parameter or a buffer has moved to other memory.
        """
        moved = [each.data_ptr() for each in self._held] != self._addresses
        return moved or not (self._answered or self._latest() is None)

    def __call__(self, leaves: list[Any]) -> Any:
        """Replay the forward with these arguments."""
        tensors = [leaves[i] for i in self._positions]
        replayed = iter(
            _Replay.apply(self, *tensors, *self._parameters)  # type: ignore[no-untyped-call]
        )
        outputs = [next(replayed) if _is_tensor(each) else each for each in self._outputs]
        return tree_unflatten(outputs, self._spec)

    def forward(self, tensors: Sequence[torch.Tensor]) -> tuple[object, list[torch.Tensor]]:
        """Return a token of this call, and its outputs."""
        with torch.no_grad():
            for mine, given in zip(self._inputs, tensors, strict=False):
                mine.copy_(given)
        self._forward.replay()
        call = _Call()
        self._latest, self._answered = weakref.ref(call), False
        return call, [each.detach().clone() for each in self._outputs if _is_tensor(each)]

    def backward(
        self, call: object, cotangents: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Replay the backward of ``call``; return the gradients of arguments and parameters."""
        if self._latest() is not call:
            raise Refused("a second backward comes after another call of the same block", NAME)
        self._answered = True
        tensors = filter(_is_tensor, self._outputs)
        pairs = zip(tensors, cotangents, strict=True)
        came = [cotangent for output, cotangent in pairs if output.requires_grad]
        for mine, given in zip(self._cotangents, came, strict=True):
            mine.copy_(given)
        self._backward.replay()
        count = len(self._inputs)
        arguments = [each if each is None else each.clone() for each in self._gradients[:count]]
        # These are referenced here too. Autograd therefore stores copies of them in ``.grad``.
        return [*arguments, *self._gradients[count:]]

    def differentiable(self) -> list[bool]:
        """Return for each tensor among the outputs whether it has a gradient."""
        return [each.requires_grad for each in self._outputs if _is_tensor(each)]


class _Call:
    """Stands for one call; exists as long as its autograd graph."""


class _Replay(torch.autograd.Function):
    """The autograd node of a replayed block."""

    @staticmethod
    def forward(ctx: Any, recording: _Recording, *tensors: torch.Tensor) -> tuple[Any, ...]:
        ctx.recording = recording
        ctx.call, outputs = recording.forward(tensors)
        pairs = zip(outputs, recording.differentiable(), strict=True)
        ctx.mark_non_differentiable(*(each for each, wanted in pairs if not wanted))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[Any, ...]:
        return None, *ctx.recording.backward(ctx.call, cotangents)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _has_hooks(module: nn.Module) -> bool:
    hooks = module._forward_hooks, module._forward_pre_hooks
    return any(hooks) or bool(module._backward_hooks or module._backward_pre_hooks)


def _differentiable(outputs: list[Any]) -> list[torch.Tensor]:
    return [each for each in outputs if _is_tensor(each) and each.requires_grad]


def _described(leaf: Any) -> object:
    """Return what a graph fixes of an argument."""
    if type(leaf) in (torch.Tensor, nn.Parameter) and leaf.is_cuda:
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad
    if isinstance(leaf, CONSTANTS):
        return leaf
    name = "a tensor on another device" if _is_tensor(leaf) else f"a {type(leaf).__name__}"
    raise Refused(f"a CUDA graph cannot take {name} as an argument", NAME)


def _settings() -> object:
    """Return the settings that choose kernels."""
    autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    return *autocast, tf32.products(), tf32.convolutions()


def _end_capture_of_draws() -> None:
    """Let the device's generator draw again after a recording that failed.

    Until torch does so itself (pytorch issue 171263), its state stays in the recording, and each
    later draw raises. A copy of the state is in none.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())


@contextmanager
def _without_cached_casts() -> Iterator[None]:
    """Let autocast convert weights anew: a graph cannot read a copy that will be freed."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def _unnoticed(block: nn.Module) -> Iterator[None]:
    """Restore the block's buffers and the random state after a run that only warms up."""
    buffers = [(each, each.clone()) for each in block.buffers()]
    state = torch.cuda.get_rng_state()
    try:
        yield
    finally:
        torch.cuda.current_stream().synchronize()
        torch.cuda.set_rng_state(state)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
