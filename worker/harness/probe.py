"""Does a split of the batch keep its promise on this model and batch? Measured, not believed.

On a few samples of the script's own first batch, in training mode with the random draws fixed,
the outputs and gradients of the whole are compared with those of three uneven chunks, for each
rule of joining. The first rule that holds is taken, else the split is refused. A mean loss is
tried on rows of unequal length too, made by masking labels: on equal lengths a sample's share and
a token's share are the same number, and only one of them is right on the next ragged batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from traceback import clear_frames
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten

from autofit.exceptions import Refused
from autofit.strategies.base import Forward
from autofit.worker.harness.digest import Digest, difference, digest
from autofit.worker.harness.escapes import refuse_escapes
from autofit.worker.harness.fixed_draws import fixed_draws
from autofit.worker.harness.joining import Batch, Cut, Join, Labels, Layout, Rule
from autofit.worker.harness.random_state import RandomState
from autofit.worker.oom import Kind, classify

SAMPLES = 4
"""Samples the probe looks at: enough for uneven chunks, few enough to cost little."""


@dataclass(frozen=True, slots=True)
class Output:
    """A root's flattened output."""

    leaves: list[Any]
    spec: TreeSpec

    @classmethod
    def of(cls, value: Any) -> Output:
        """Flatten what a root returned."""
        return cls(*tree_flatten(value))


def find_layout(module: nn.Module, forward: Forward, batch: Batch) -> Layout:
    """Return how calls like this one can be split; raise ``Refused`` with the reason if not."""
    reasons = []
    for dim in (0, 1):
        batched = batched_leaves(batch, dim)
        if not batched:
            continue
        if batch.leaves[batched[0]].shape[dim] < 2:
            reasons.append("the model sees one sample at a time already")
            continue
        try:
            return _find_frugally(module, forward, batch, Layout(dim, batched, ()))
        except Refused as refusal:
            reasons.append(str(refusal))
    raise Refused(reasons[0] if reasons else "no tensor argument of the model shows a batch")


def _find_frugally(module: nn.Module, forward: Forward, batch: Batch, layout: Layout) -> Layout:
    """Probe on ``SAMPLES`` samples, on two where memory has no room for more."""
    found, error = _try(module, forward, batch, layout, min(SAMPLES, layout.size(batch)))
    if error is not None and layout.size(batch) > 2:
        clear_frames(error.__traceback__)
        found, error = _try(module, forward, batch, layout, 2)
    if error is not None:
        raise error
    assert found is not None
    return found


def _try(
    module: nn.Module, forward: Forward, batch: Batch, layout: Layout, samples: int
) -> tuple[Layout | None, Exception | None]:
    """Return the layout, or the error where memory ran out."""
    try:
        return _find(module, forward, batch, layout, samples), None
    except Refused:
        raise
    except Exception as error:
        kind = classify(error).kind
        if kind is Kind.OOM:
            return None, error
        if kind is not Kind.NOT_OOM:
            raise
        line = (str(error).splitlines() or [type(error).__name__])[0]
    _run_whole(module, forward, batch)
    raise Refused(f"the model cannot run on a part of the batch: {line}")


def _run_whole(module: nn.Module, forward: Forward, batch: Batch) -> None:
    """Let an error through that the model raises on the whole batch too: the script's own."""
    args, kwargs = batch.call(batch.leaves)
    with preserved(module), torch.no_grad():
        try:
            forward(*args, **kwargs)
        except Exception as error:
            if classify(error).kind is Kind.NOT_OOM:
                raise


def batched_leaves(batch: Batch, dim: int) -> tuple[int, ...]:
    """Return the arguments that have as many entries along ``dim`` as the first tensor has."""
    tensors = [
        (index, leaf)
        for index, leaf in enumerate(batch.leaves)
        if isinstance(leaf, torch.Tensor) and leaf.ndim > dim
    ]
    if not tensors:
        return ()
    size = tensors[0][1].shape[dim]
    return tuple(index for index, leaf in tensors if leaf.shape[dim] == size)


def _find(
    module: nn.Module, forward: Forward, batch: Batch, layout: Layout, samples: int
) -> Layout:
    leaves = detached(layout.take(batch, (0, samples)))
    part = Batch([_own(leaf) for leaf in leaves], batch.spec)
    with preserved(module), torch.enable_grad(), full_precision():
        observed = Observer()
        with observed:
            layout = replace(layout, draws=_draws(part, forward))
        _refuse_changed_buffers(module, part, forward)
        refuse_escapes(part, forward, module.parameters())
        with _comparable(module, part, forward, layout.draws):
            return _Comparison(module, forward, part, layout, observed).find()


class _Comparison:
    """The whole against its chunks."""

    def __init__(
        self, module: nn.Module, forward: Forward, part: Batch, layout: Layout, seen: Observer
    ) -> None:
        self.forward = forward
        self.layout = layout
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.size = layout.size(part)
        self.cuts = _uneven(self.size)
        self.tolerance = tolerance(self.parameters)
        self.labels = [*seen.labels(part, layout), *_masks(part, layout)]
        self.parts = [part, *self._ragged(part)]

    def find(self) -> Layout:
        """Return the layout with its joins; raise ``Refused`` when no rule holds."""
        candidates: list[list[tuple[Join, Labels | None]]] | None = None
        for part in self.parts:
            whole = self._run(part, (0, self.size))
            chunks = [self._run(part, cut) for cut in self.cuts]
            if any(chunk.spec != whole.spec for chunk in chunks):
                raise Refused("the model's output has another structure for a part of the batch")
            if candidates is None:
                candidates = [self._possible(leaf) for leaf in whole.leaves]
            candidates = self._holding(candidates, part, whole, chunks)
        assert candidates is not None
        labels = next((one for first, *_ in candidates for one in [first[1]] if one), None)
        joins = tuple(first[0] for first, *_ in candidates)
        layout = replace(self.layout, joins=joins, labels=labels)
        for part in self.parts:
            self._check_gradients(layout, part)
        self._check_power(layout)
        return layout

    def _check_power(self, layout: Layout) -> None:
        """Refuse where samples in another order would have passed as well."""
        whole = self._run(self.parts[0], (0, self.size))
        for leaf, join in zip(whole.leaves, layout.joins, strict=True):
            if join.rule is not Rule.CONCATENATE or not leaf.requires_grad:
                continue
            rows = leaf.shape[join.dim] // self.size
            if self._close(leaf.roll(rows, join.dim), leaf):
                raise Refused("the model answers every sample alike: nothing can be proven on it")

    def _run(self, part: Batch, cut: Cut) -> Output:
        args, kwargs = part.call(self.layout.take(part, cut))
        return Output.of(self.forward(*args, **kwargs))

    def _possible(self, leaf: Any) -> list[tuple[Join, Labels | None]]:
        if not isinstance(leaf, torch.Tensor):
            return [(Join(Rule.SAME), None)]
        if leaf.ndim == 0 or leaf.shape == (1,):
            tokens: list[tuple[Join, Labels | None]] = [
                (Join(Rule.TOKENS), labels) for labels in self.labels
            ]
            return [*tokens, (Join(Rule.SAMPLES), None), (Join(Rule.SUM), None)]
        rows: list[tuple[Join, Labels | None]] = [
            (Join(Rule.CONCATENATE, dim), None) for dim in range(leaf.ndim)
        ]
        return rows if leaf.requires_grad else [*rows, (Join(Rule.SAME), None)]

    def _holding(
        self,
        candidates: Sequence[list[tuple[Join, Labels | None]]],
        part: Batch,
        whole: Output,
        chunks: Sequence[Output],
    ) -> list[list[tuple[Join, Labels | None]]]:
        """Return the candidates that give this whole from these chunks."""
        holding = []
        for index, (expected, possible) in enumerate(zip(whole.leaves, candidates, strict=True)):
            column = [chunk.leaves[index] for chunk in chunks]
            good = [c for c in possible if self._holds(*c, part, column, expected)]
            if not good:
                raise Refused(_mismatch(expected))
            holding.append(good)
        return holding

    def _holds(
        self, join: Join, labels: Labels | None, part: Batch, column: Sequence[Any], expected: Any
    ) -> bool:
        if join.rule is Rule.SAME:
            return all(_same(value, expected) for value in column)
        if join.rule is Rule.CONCATENATE:
            lengths = [stop - start for start, stop in self.cuts]
            rows, rest = divmod(expected.shape[join.dim], self.size)
            if (
                rest
                or not rows
                or any(
                    value.ndim != expected.ndim or value.shape[join.dim] != rows * length
                    for value, length in zip(column, lengths, strict=True)
                )
            ):
                return False
            joined = torch.cat(list(column), join.dim)
            return joined.shape == expected.shape and self._close(joined, expected)
        weights = replace(self.layout, labels=labels).weights(join.rule, part)
        pairs = [(value, weights.of(cut)) for value, cut in zip(column, self.cuts, strict=True)]
        joined = sum(value.double() * weight for value, weight in pairs if weight)
        return isinstance(joined, torch.Tensor) and self._close(joined, expected)

    def _close(self, found: torch.Tensor, expected: torch.Tensor) -> bool:
        if not expected.is_floating_point():
            return bool(torch.equal(found, expected))
        distance = (found.detach().double() - expected.detach().double()).norm()
        scale = expected.detach().double().norm()
        return bool(distance <= self.tolerance * scale)

    def _check_gradients(self, layout: Layout, part: Batch) -> None:
        expected = self._digest(layout, part, (0, self.size))
        found: Digest | None = None
        for cut in self.cuts:
            one = self._digest(layout, part, cut)
            found = one if found is None else [a + b for a, b in zip(found, one, strict=True)]
        assert found is not None
        if (error := difference(found, expected)) > self.tolerance:
            raise Refused(f"the gradients of a split batch differ by {error:.1e}, relative")

    def _digest(self, layout: Layout, part: Batch, cut: Cut) -> Digest:
        output = self._run(part, cut)
        outputs, cotangents = [], []
        for leaf, join in zip(output.leaves, layout.joins, strict=True):
            if not (isinstance(leaf, torch.Tensor) and leaf.requires_grad):
                continue
            weight = layout.weights(join.rule, part).of(cut) if join.scalar else None
            if weight == 0.0:
                continue
            outputs.append(leaf)
            if weight is not None:
                cotangents.append(torch.full_like(leaf, weight))
            else:
                rows = leaf.shape[join.dim] // (cut[1] - cut[0])
                cotangents.append(pattern(leaf, join.dim, cut[0] * rows))
        if not outputs:
            return [torch.zeros(1, dtype=torch.float64, device=p.device) for p in self.parameters]
        return digest(outputs, cotangents, self.parameters)

    def _ragged(self, part: Batch) -> Iterator[Batch]:
        """Yield the batch with some labels of its first samples masked, once for each kind."""
        for labels in {each.leaf: each for each in self.labels}.values():
            leaves = list(part.leaves)
            masked = leaves[labels.leaf].clone()
            rows = masked.movedim(self.layout.dim, 0)
            if rows.ndim == 1:
                rows[0] = labels.ignore_index
            else:
                rows[0, ..., rows.shape[-1] // 2 :] = labels.ignore_index
            leaves[labels.leaf] = masked
            yield Batch(leaves, part.spec)


def _own(leaf: Any) -> Any:
    """Copy whole numbers, so that one tensor given as input and as labels can be told apart."""
    whole = isinstance(leaf, torch.Tensor) and not leaf.is_floating_point()
    return leaf.clone() if whole else leaf


class Observer(TorchFunctionMode):
    """Sees which targets the model's own cross-entropy is given, and what it ignores.

    And what it looks up in embeddings: an argument that is looked up is no label, and masking it
    would be an index out of range (which ends a CUDA context).
    """

    def __init__(self) -> None:
        super().__init__()
        self._targets: list[tuple[torch.Tensor, int]] = []
        self._lookups: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (nn.functional.cross_entropy, nn.functional.nll_loss):
            target = kwargs.get("target", args[1] if len(args) > 1 else None)
            ignore = kwargs.get("ignore_index", args[4] if len(args) > 4 else -100)
            if isinstance(target, torch.Tensor) and not target.is_floating_point():
                self._targets.append((target.detach().flatten(), ignore))
        elif func is nn.functional.embedding:
            self._lookups.append(kwargs["input"] if "input" in kwargs else args[0])
        return func(*args, **kwargs)

    def labels(self, part: Batch, layout: Layout) -> list[Labels]:
        """Return the arguments that were a cross-entropy's target, whole or shifted by one."""
        found = []
        for index in layout.batched:
            leaf = part.leaves[index]
            if leaf.is_floating_point() or leaf.dtype == torch.bool or self._looked_up(leaf):
                continue
            for target, ignore in self._targets:
                for shift in (0, 1) if leaf.ndim > 1 else (0,):
                    if _is_target(leaf, target, ignore, shift):
                        found.append(Labels(index, ignore, shift))
        return list(dict.fromkeys(found))

    def _looked_up(self, leaf: torch.Tensor) -> bool:
        storage = leaf.untyped_storage().data_ptr()
        return any(each.untyped_storage().data_ptr() == storage for each in self._lookups)


def _is_target(leaf: torch.Tensor, target: torch.Tensor, ignore: int, shift: int) -> bool:
    shifted = leaf[..., shift:]
    padded = nn.functional.pad(shifted, (0, shift), value=ignore)
    return any(
        candidate.numel() == target.numel()
        and bool((candidate.flatten().to(target.device) == target).all())
        for candidate in (shifted, padded)
    )


def _masks(part: Batch, layout: Layout) -> list[Labels]:
    """Return the arguments that are masks of ones and zeros over the entries of a sample."""
    found = []
    for index in layout.batched:
        leaf = part.leaves[index]
        if leaf.ndim < 2 or leaf.requires_grad or leaf.numel() > 1 << 24:
            continue
        if leaf.dtype == torch.bool or bool(((leaf == 0) | (leaf == 1)).all()):
            found += [Labels(index, 0, 0), Labels(index, 0, 1)]
    return found


def _draws(part: Batch, forward: Forward) -> bool:
    before = RandomState.now()
    args, kwargs = part.call(part.leaves)
    with torch.no_grad():
        forward(*args, **kwargs)
    return before != RandomState.now()


def _refuse_changed_buffers(module: nn.Module, part: Batch, forward: Forward) -> None:
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    args, kwargs = part.call(part.leaves)
    with torch.no_grad():
        forward(*args, **kwargs)
    for name, buffer in module.named_buffers():
        if name in before and not _same(buffer, before[name]):
            raise Refused(f"the model changes its buffer {name} in every forward")


@contextmanager
def _comparable(module: nn.Module, part: Batch, forward: Forward, draws: bool) -> Iterator[None]:
    """Within it, two forwards of the same samples give the same.

    In training mode with fixed draws; in evaluation mode where something still draws, out of
    Python's sight.
    """
    if not draws:
        yield
        return
    with fixed_draws(module):
        hidden = _draws(part, forward)
    modes = [(each, each.training) for each in module.modules()]
    try:
        if hidden:
            module.eval()
        with nullcontext() if hidden else fixed_draws(module):
            yield
    finally:
        for each, training in modes:
            each.training = training


@contextmanager
def preserved(module: nn.Module) -> Iterator[None]:
    """Restore the random generators and the module's buffers afterwards."""
    state = RandomState.now()
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        state.restore()
        with torch.no_grad():
            for buffer, saved in buffers:
                if buffer.shape == saved.shape:
                    buffer.copy_(saved)


@contextmanager
def full_precision() -> Iterator[None]:
    """Within it, fp32 products and convolutions are computed in fp32, without TF32.

    How a batch is split does not depend on it, and the comparison is sharper without.
    """
    matmul = torch.get_float32_matmul_precision()
    cudnn = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = cudnn


def tolerance(parameters: Sequence[torch.Tensor]) -> float:
    """Return the relative difference that the order of sums may make in this precision."""
    epsilon = max((torch.finfo(p.dtype).eps for p in parameters), default=1e-7)
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        epsilon = torch.finfo(torch.bfloat16).eps
    elif torch.get_float32_matmul_precision() != "highest":
        epsilon = max(epsilon, 2.0**-11)
    return min(0.05, 2000 * epsilon)


def _uneven(samples: int) -> list[Cut]:
    """Cut 4 samples into 2, 1, 1; fewer into ones."""
    first = max(1, samples - 2)
    return [(0, first), *((start, start + 1) for start in range(first, samples))]


def pattern(like: torch.Tensor, dim: int, first: int) -> torch.Tensor:
    """Return a fixed incoming gradient for rows ``first`` and on: smooth, none alike."""
    rows = torch.arange(first, first + like.shape[dim], device=like.device, dtype=torch.float64)
    shape = [1] * like.ndim
    shape[dim] = -1
    rest = torch.arange(like.numel() // max(like.shape[dim], 1), device=like.device)
    other = [size for axis, size in enumerate(like.shape) if axis != dim]
    columns = torch.cos(rest.double()).view(other).unsqueeze(dim)
    return (torch.sin(1.0 + rows).view(shape) * columns).to(like.dtype)


def detached(leaves: Sequence[Any]) -> list[Any]:
    """Return the leaves, tensors among them cut off from their graph."""
    return [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _same(value: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return isinstance(value, torch.Tensor) and bool(torch.equal(value, expected))
    return type(value) is type(expected) and bool(value == expected)


def _mismatch(expected: Any) -> str:
    if not isinstance(expected, torch.Tensor):
        return f"the model returns a {type(expected).__name__} that depends on the batch"
    kind = "a number" if expected.numel() == 1 else f"a tensor of shape {tuple(expected.shape)}"
    return f"the model returns {kind} that its parts' outputs do not add up to"
