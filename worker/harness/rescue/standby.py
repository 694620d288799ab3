"""Rescues calls that run whole; nothing of the model changes until memory has run out.

A plan that does not split the batch leaves a root as the script has it: its graph and its gradients
are the same bit by bit. Each call is noted: its arguments, the random state, and in backward the
gradient of each output. When memory runs out

* in forward, the call starts again in chunks, and so does every later call;
* in backward, the graph is useless, but the script still holds it. Its saved tensors are freed
  (``SavedTensor.register_hooks`` replaces them by nothing). The batch runs again in chunks from the
  noted gradients, for the parameters whose ``.grad`` has not changed. The script's own call of
  ``backward`` then returns as usual.

A call that cannot be split, or whose split nobody has verified, runs again in one piece, with
autograd's saved tensors in host memory. So do later calls of its size.

The error propagates with the reason added if a gradient could be wrong: the script keeps the graph
for another pass, the arguments need gradients, the loss uses parameters directly, or one output is
computed from another.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from autofit.exceptions import Refused
from autofit.strategies.base import Forward, Root
from autofit.worker.harness.batch.layout import Batch
from autofit.worker.harness.patching.gradient_reads import Marks, marks
from autofit.worker.harness.patching.observers import Seams, Watcher, inside, plain_backward
from autofit.worker.harness.torch_state.graph import (
    Edge,
    edges_of,
    next_edges,
    variable_of,
    walk,
)
from autofit.worker.harness.torch_state.guarded import beside
from autofit.worker.harness.torch_state.host_saved import saved_on_host
from autofit.worker.harness.torch_state.module_state import PLAIN_TYPES
from autofit.worker.harness.torch_state.modules import version_of, without_cache
from autofit.worker.harness.torch_state.pytree import flatten
from autofit.worker.harness.torch_state.rng import Ambient, RandomState
from autofit.worker.harness.verification.splits import Splits
from autofit.worker.oom.attempt import attempt, free_frames

_OURS = "autofit"
"""Key in a node's own dictionary for the root's outputs that it made."""
LOST = "a shortage of memory in this model ends the run"
UNUSUAL = "the script calls torch.autograd.grad, or keeps a graph for another backward"


@dataclass(frozen=True, slots=True)
class Noted:
    """Some state of a model at one time."""

    buffers: list[torch.Tensor]
    copies: list[torch.Tensor]
    values: list[tuple[dict[str, Any], str, Any]]
    """The attributes of a module, the name of one, and its value."""

    @classmethod
    def now(cls, buffers: list[torch.Tensor], places: list[tuple[dict[str, Any], str]]) -> Noted:
        """Copy the buffers and the attributes at ``places``."""
        copies = [torch.empty_like(each) for each in buffers]
        if buffers:
            torch._foreach_copy_(copies, [each.detach() for each in buffers])
        return cls(buffers, copies, [(own, name, own.get(name)) for own, name in places])

    def restore(self) -> None:
        """Put everything back as it was then."""
        for each, copy in zip(self.buffers, self.copies, strict=True):
            if not torch.equal(each, copy):  # an open graph may have saved it
                each.detach().copy_(copy)
        for own, name, value in self.values:
            own[name] = value

    @contextmanager
    def again(self) -> Iterator[None]:
        """Put everything back within the context."""
        present = Noted.now(self.buffers, [(own, name) for own, name, _ in self.values])
        self.restore()
        try:
            yield
        finally:
            present.restore()


class StateChanges:
    """Notes what the calls of one model change: a call that runs again must change it only once.

    These are buffers, such as running statistics, and plain attributes, such as a count of calls.
    The first call shows which, so later calls copy no others.
    """

    def __init__(self, module: nn.Module) -> None:
        self._buffers = [each for each in module.buffers() if not each.is_inference()]
        self._places = [
            (vars(each), name)
            for each in module.modules()
            for name, value in vars(each).items()
            if type(value) in PLAIN_TYPES
        ]
        self._known = False

    def note(self) -> Noted:
        """Return the state before a call."""
        return Noted.now(self._buffers, self._places)

    def called(self, before: Noted) -> None:
        """Learn from the first call what calls change; ``before``: the state before it."""
        if self._known:
            return
        pairs = zip(before.buffers, before.copies, strict=True)
        self._buffers = [each for each, copy in pairs if not torch.equal(each, copy)]
        self._places = [
            (own, name) for own, name, value in before.values if own.get(name) is not value
        ]
        self._known = True


class RescuedRoot(Root, Protocol):
    """What the rescue needs of a root."""

    splits: Splits
    """How its calls are split."""

    @property
    def forward(self) -> Forward:
        """The model's call under the plan."""

    @property
    def whole(self) -> Forward:
        """The call of the script in one piece, inside the wrappers of the plan."""

    @property
    def rerun(self) -> Forward:
        """What runs a call again from its start."""


@dataclass(eq=False)
class PlainCall:
    """What is known of one call that ran whole."""

    root: RescuedRoot
    forward: Forward
    """What runs the call in one piece."""
    splits: bool
    """Whether the call may run again in chunks."""
    batch: Batch | None
    """``None`` after backward."""
    size: int
    """Entries of its tensor arguments."""
    state: Noted
    """What the call changes in the model, as it was before."""
    training: bool
    start: RandomState
    ambient: Ambient
    versions: list[int] = field(default_factory=list)
    """Versions, after forward, of the tensor arguments and the model's own tensors."""
    in_place: int = 0
    """Number of outputs that are plain tensors, before the first that is not. They have the same
    positions if the chunks return no cache."""
    noted: bool = False
    """The gradients of its outputs are noted."""
    cotangents: dict[int, torch.Tensor] = field(default_factory=dict)
    """The gradient of each output, from backward."""

    def without_cache(self) -> Batch:
        """Return the arguments that the chunks receive."""
        assert self.batch is not None
        args, kwargs = self.batch.call(self.batch.leaves)
        return Batch.of(args, without_cache(self.root.module, kwargs))

    def drops_cache(self) -> bool:
        """Return whether the chunks return no cache although this call returned one."""
        assert self.batch is not None
        _, kwargs = self.batch.call(self.batch.leaves)
        return without_cache(self.root.module, kwargs) is not kwargs


class Standby(Watcher):
    """Notes the calls of a run's roots, and finishes them in chunks when memory runs out."""

    def __init__(
        self,
        seams: Seams,
        is_shortage: Callable[[BaseException], bool],
        has_fallback: Callable[[], bool] = lambda: False,
        tell_kept: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """``has_fallback``: whether a forward runs again under another plan, and not in chunks.

        ``tell_kept``: called with the reason when a call keeps its saved tensors on the host.
        """
        self._seams = seams
        self._is_shortage = is_shortage
        self._has_fallback = has_fallback
        self._tell_kept = tell_kept
        self._tensors: dict[int, list[torch.Tensor]] = {}
        """Parameters and buffers of each root that was called, keyed by the root's ``id``."""
        self._leaves: list[torch.Tensor] = []
        """The distinct parameters among them."""
        self._changes: dict[int, StateChanges] = {}
        """What calls change in each root, by the root's ``id``."""
        self._too_large: dict[int, int] = {}
        """The smallest size of a call that did not fit, by the root's ``id``."""
        self._blind: set[int] = set()
        """``id`` of the roots whose calls cannot be noted; they run without a rescue."""
        self._elsewhere: dict[int, bool] = {}
        """Whether a root (by ``id``) draws from Python's or NumPy's generators."""
        self._running: list[PlainCall] | None = None
        """Calls whose outputs the present backward pass has reached; ``None`` outside of one."""
        self._unusual = False
        """The script does more than one backward pass through each graph."""

    # --- forward ---------------------------------------------------------------------------

    def call(self, root: RescuedRoot, /, *args: Any, **kwargs: Any) -> Any:
        """Run the root whole; after a shortage, run this call and all later ones in chunks."""
        return self._run(root, root.whole, args, kwargs, splits=True)

    def in_one_piece(self, root: RescuedRoot, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Run a call of a split root that cannot be split."""
        return self._run(root, forward, args, kwargs, splits=False)

    def _run(
        self, root: RescuedRoot, forward: Forward, args: Any, kwargs: Any, *, splits: bool
    ) -> Any:
        call = None
        if id(root) not in self._blind:
            note = partial(self._note, root, forward, args, kwargs, splits)
            call = beside(note, None, LOST)
        if call is None:
            self._blind.add(id(root))
            return forward(*args, **kwargs)
        if call.size >= self._too_large.get(id(root), sys.maxsize):
            return self._saving_on_host(call)
        try:
            output = forward(*args, **kwargs)
        except Exception as error:
            if self._has_fallback() or not self._is_shortage(error):
                raise
            failure = error
        else:
            call.noted = beside(lambda: self._follow(call, output), False, LOST)
            if not call.noted:
                self._blind.add(id(root))
            return output
        with _with_reason(failure, self._is_shortage):
            free_frames(failure)
            reason = self._split(call, failure, "forward")
            call.start.restore()
            call.state.restore()
            if reason:
                return self._first_on_host(call, reason)
        failure.__traceback__ = None  # it holds this frame, which holds the batch
        return root.rerun(*args, **kwargs)

    def _note(
        self, root: RescuedRoot, forward: Forward, args: Any, kwargs: Any, splits: bool
    ) -> PlainCall:
        if id(root) not in self._tensors:
            self._tensors[id(root)] = _tensors(root.module)
            found = {id(t): t for each in self._tensors.values() for t in each if t.is_leaf}
            self._leaves = list(found.values())
            self._changes[id(root)] = StateChanges(root.module)
        return PlainCall(
            root=root,
            forward=forward,
            splits=splits,
            batch=(batch := Batch.of(args, kwargs)),
            size=sum(each.numel() for each in batch.leaves if isinstance(each, torch.Tensor)),
            state=self._changes[id(root)].note(),
            training=root.module.training,
            start=RandomState.now(elsewhere=self._elsewhere.get(id(root), True)),
            ambient=Ambient.now(),
        )

    def _versions(self, root: RescuedRoot, batch: Batch) -> list[int]:
        arguments = [leaf for leaf in batch.leaves if isinstance(leaf, torch.Tensor)]
        versions = [-1 if each.is_inference() else each._version for each in arguments]
        return [*versions, *map(version_of, self._tensors[id(root)])]

    def _follow(self, call: PlainCall, output: Any) -> bool:
        """Note which graph node made each output, and register hooks for their gradients."""
        assert call.batch is not None
        self._changes[id(call.root)].called(call.state)
        call.versions = self._versions(call.root, call.batch)
        if id(call.root) not in self._elsewhere:
            now = RandomState.now()
            self._elsewhere[id(call.root)] = call.start.elsewhere != now.elsewhere
        call.in_place = _tensors_first(output)
        for index, leaf in enumerate(flatten(output)[0]):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                _root_outputs_of(leaf.grad_fn)[leaf.output_nr] = call, index
                leaf.register_hook(self._receiver(call, index))
        return True

    def _receiver(self, call: PlainCall, index: int) -> Callable[[torch.Tensor], None]:
        def receive(cotangent: torch.Tensor) -> None:
            if self._running is None:
                return
            if not call.cotangents:
                self._running.append(call)
            call.cotangents[index] = cotangent

        return receive

    def differentiates(self) -> None:
        """Give up the rescue: it cannot repeat this kind of differentiation in chunks."""
        self._unusual = True

    # --- how to go on ----------------------------------------------------------------------

    def _split(self, call: PlainCall, error: BaseException, phase: str) -> str:
        """Run the root in chunks from now on; return the reason if it cannot, else nothing."""
        if not call.splits:
            return "this call cannot be split"
        try:
            outcome = attempt(partial(self._split_root, call, error, phase))
        except Refused as refusal:
            return str(refusal)
        return "" if outcome.fits else "memory is too small to verify a split"

    def _split_root(self, call: PlainCall, error: BaseException, phase: str) -> None:
        if self._unusual:
            raise Refused(UNUSUAL)
        root, batch = call.root, call.without_cache()
        with inside(self._seams), torch.enable_grad():
            layout = root.splits.layout(batch)
        if layout.updates:
            raise Refused("the model counts its calls, and has counted this one already")
        size = layout.size(batch)
        if size < 2:
            raise Refused("a single sample cannot be split")
        undo, chunked = root.split(size), root.splits.chunked
        assert chunked is not None
        try:
            chunked.refuse_listeners()
        except Refused:
            undo()
            raise
        root.taken_back_by(undo)
        chunked.shrink(error, phase, size)

    def _first_on_host(self, call: PlainCall, reason: str) -> Any:
        """Run a call with its saved tensors on the host; raise ``Refused`` if it does not fit."""
        outcome = attempt(partial(self._saving_on_host, call))
        if not outcome.fits:
            raise Refused(reason)
        self._keep_on_host(call, reason)
        return outcome.value

    def _saving_on_host(self, call: PlainCall) -> Any:
        assert call.batch is not None
        args, kwargs = call.batch.call(call.batch.leaves)
        with saved_on_host(call.root.module.parameters()):
            return call.forward(*args, **kwargs)

    def _keep_on_host(self, call: PlainCall, reason: str) -> None:
        """Keep the saved tensors of later calls on the host, if they are as large as ``call``."""
        known = self._too_large.get(id(call.root), sys.maxsize)
        self._too_large[id(call.root)] = min(known, call.size)
        self._tell_kept(reason)

    # --- backward --------------------------------------------------------------------------

    def backward(self, tensors: Any, run: Callable[[], None], *, keeps_graph: bool) -> None:
        """Run the script's backward pass; finish it in chunks if memory runs out."""
        self._unusual |= keeps_graph
        before = beside(lambda: marks(self._leaves), None, LOST)
        calls: list[PlainCall] = []
        failure = None
        self._running = calls
        try:
            run()
        except Exception as error:
            if not self._is_shortage(error):
                raise
            failure = error
        finally:
            self._running = None
        if failure is not None:
            if before is None:
                raise failure
            with _with_reason(failure, self._is_shortage):
                self._finish_again(tensors, calls, before, failure)
            failure.__traceback__ = None
        for call in calls:
            call.cotangents.clear()
            if not keeps_graph:
                call.batch = None

    def _finish_again(
        self,
        tensors: Any,
        calls: Sequence[PlainCall],
        before: Marks,
        error: BaseException,
    ) -> None:
        """Compute the missing gradients into ``.grad``; raise ``Refused`` if some are lost."""
        free_frames(error)
        if self._unusual:
            raise Refused(UNUSUAL)
        graph = Graph(tensors)
        self._refuse_unless_complete(graph, calls)
        changes = zip(self._leaves, before, marks(self._leaves), strict=True)
        missing = {id(leaf) for leaf, then, now in changes if then == now}
        graph.release()
        gc.collect()
        now = RandomState.now()
        for call in calls:
            split = call.splits and call.root.splits.chunked is not None
            if reason := "" if split else self._split(call, error, "backward"):
                self._finish_on_host(call, graph, missing, reason)
            else:
                self._finish(call, graph, missing)
        now.restore()

    def _refuse_unless_complete(self, graph: Graph, calls: Sequence[PlainCall]) -> None:
        if graph.leaves:
            raise Refused("the loss uses parameters directly, not only the model's output")
        if {id(call) for call in graph.used} != {id(call) for call in calls}:
            raise Refused("memory ran out before backward reached the model")
        for call, outputs in graph.used.items():
            if call.batch is None or (call.splits and call.root.splits.chunked is not None):
                raise Refused("the model was called several times before this backward pass")
            if not call.noted:
                raise Refused("autofit cannot follow the model's output")
            if call.drops_cache() and max(outputs) >= call.in_place:
                raise Refused("an output that the loss uses comes after a cache")
            if not outputs <= call.cotangents.keys():
                raise Refused("memory ran out before backward reached the model")
            if any(_needs_gradient(leaf) for leaf in call.batch.leaves):
                raise Refused("the model's arguments need gradients too")
            changed = call.versions != self._versions(call.root, call.batch)
            if changed or call.training != call.root.module.training:
                raise Refused("the weights, the batch or the mode changed since forward")
            if graph.inner_leaves - {id(t) for t in _tensors(call.root.module)}:
                raise Refused(
                    "the gradients also reach tensors that are not the model's parameters"
                )

    def _finish(self, call: PlainCall, graph: Graph, missing: set[int]) -> None:
        chunked, batch = call.root.splits.chunked, call.without_cache()
        assert chunked is not None
        incoming = {index: call.cotangents[index] for index in sorted(graph.used[call])}
        parameters = [p for p in chunked.parameters if id(p) in missing]
        chunked.finish(call.root.forward, batch, incoming, parameters, call.start, call.ambient)

    def _finish_on_host(
        self, call: PlainCall, graph: Graph, missing: set[int], reason: str
    ) -> None:
        """Run a call again in one piece, and its backward for the ``missing`` gradients."""
        wanted = sorted(graph.used[call])
        own = call.root.module.parameters()
        parameters = [p for p in own if p.requires_grad and id(p) in missing]
        call.start.restore()
        outcome = attempt(partial(self._again_on_host, call, wanted, parameters))
        if not outcome.fits:
            raise Refused(reason)
        self._keep_on_host(call, reason)

    def _again_on_host(
        self, call: PlainCall, wanted: list[int], parameters: list[nn.Parameter]
    ) -> None:
        with (
            inside(self._seams),
            torch.enable_grad(),
            call.ambient.again(),
            call.state.again(),
        ):
            outputs = flatten(self._saving_on_host(call))[0]
            cotangents = [call.cotangents[index] for index in wanted]
            plain_backward([outputs[index] for index in wanted], cotangents, inputs=parameters)


class Graph:
    """The autograd graph behind the tensors that the script differentiates."""

    def __init__(self, tensors: Any) -> None:
        first = tensors if isinstance(tensors, (tuple, list)) else [tensors]
        self.leaves: set[int] = set()
        """``id`` of the leaves that are reached without passing through a root."""
        self.inner_leaves: set[int] = set()
        """``id`` of the leaves that are reached through a root."""
        self.used: dict[PlainCall, set[int]] = {}
        """The roots' calls behind the tensors, with the outputs that are used."""
        self._nodes: set[Node] = set()
        outputs: set[Node] = set()
        for edge in walk(edges_of(first), self._nodes, lambda edge: _output_at(edge) is None):
            if (made := _output_at(edge)) is not None:
                call, index = made
                self.used.setdefault(call, set()).add(index)
                outputs.add(edge[0])
            elif (variable := variable_of(edge[0])) is not None:
                self.leaves.add(id(variable))
        outputs -= self._nodes
        self._nodes |= outputs
        behind = [edge for node in outputs for edge in next_edges(node)]
        for edge in walk(behind, self._nodes):
            made = _output_at(edge)
            if made is not None and made[1] in self.used.get(made[0], ()):
                raise Refused(
                    "the loss uses an output of the model and another one computed from it"
                )
            if (variable := variable_of(edge[0])) is not None:
                self.inner_leaves.add(id(variable))

    def release(self) -> None:
        """Free the saved tensors of the graph, which is of no more use."""
        for node in self._nodes:
            for name in dir(node):
                if name.startswith("_raw_saved_"):
                    _empty(node, name)


def _output_at(edge: Edge) -> tuple[PlainCall, int] | None:
    """Return the call and the position of the root's output at an edge; ``None`` elsewhere."""
    return _root_outputs_of(edge[0]).get(edge[1])


def _root_outputs_of(node: Node) -> dict[int, tuple[PlainCall, int]]:
    """Return the roots' outputs that ``node`` made, from the node's own dictionary."""
    metadata: Any = node.metadata  # a property, though torch declares a method
    made: dict[int, tuple[PlainCall, int]] = metadata.setdefault(_OURS, {})
    return made


def _empty(node: Node, name: str) -> None:
    try:
        saved = getattr(node, name)
    except RuntimeError:  # released by backward
        return
    for each in saved if isinstance(saved, (tuple, list)) else [saved]:
        with contextlib.suppress(RuntimeError):  # freed, missing, or under other hooks
            each.register_hooks(lambda tensor: None, _freed)


def _freed(packed: None) -> torch.Tensor:
    raise RuntimeError("memory ran out in a backward pass through this graph: autofit freed it")


@contextlib.contextmanager
def _with_reason(
    failure: BaseException, is_shortage: Callable[[BaseException], bool]
) -> Iterator[None]:
    """Raise the shortage again, with the reason added, if the rescue is refused or fails."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the shortage is raised in its place
        if not is_shortage(error):
            reason = error if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
            failure.add_note(f"autofit could not go on in smaller parts: {reason}")
        raise failure from None


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [t for t in (*module.parameters(), *module.buffers()) if not t.is_inference()]


def _tensors_first(output: Any) -> int:
    """Return how many outputs are plain tensors, before the first that is not."""
    parts = tree_leaves(output, is_leaf=lambda each: each is not output)
    return sum(1 for _ in takewhile(lambda each: isinstance(each, torch.Tensor), parts))


def _needs_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad
