"""Compares whole samples with uneven chunks of them, and finds the rules of joining.

One comparison holds at one *point*: with certain weights and samples. A rule must hold at all
points that are compared, by outputs, by gradients and by the state that a forward changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path, tree_unflatten

from autofit.exceptions import Refused
from autofit.strategies.base import Forward
from autofit.worker.harness.batch.layout import Batch, Cut, Join, Labels, Layout, Rule, joined
from autofit.worker.harness.torch_state.pytree import flatten
from autofit.worker.harness.torch_state.reachable_state import Snapshot, equal
from autofit.worker.harness.torch_state.rng import RandomState
from autofit.worker.harness.verification.fixed_draws import FixedDraws
from autofit.worker.harness.verification.gradient_digest import (
    Digest,
    coefficients,
    differences,
    length,
    mean_difference,
    pattern,
)
from autofit.worker.harness.verification.loss_weights import Observer, possible_divisors
from autofit.worker.harness.verification.shifted_weights import Move, ShiftedWeights, last_bits
from autofit.worker.harness.verification.side_effects import (
    refuse_changes_in_backward,
    refuse_other_changes,
)
from autofit.worker.harness.verification.tolerances import TOLERANCES
from autofit.worker.oom.attempt import attempt_model

PIECE = 1 << 24
"""The number of entries that are compared at a time."""
STEEP = 2.0**20
"""A factor of a chunk's incoming gradient. It is a power of two, which rounds nothing: a backward
that is linear gives gradients that are larger by just this factor."""
LOUD = 2.0**7
"""A factor of one sample's incoming gradient."""
NOT_LINEAR = (
    "the model changes gradients in its backward by their size, as clipping does, and a part of the"
    " batch has other gradients"
)
CLOSER = 10
"""An output must be this many times closer to its own sample's output than to another sample's."""


@dataclass(frozen=True, slots=True)
class Output:
    """A root's flattened output."""

    leaves: list[Any]
    spec: TreeSpec

    @classmethod
    def of(cls, value: Any) -> Output:
        """Flatten a root's output."""
        return cls(*flatten(value))

    def place(self, index: int) -> str:
        """Return where a leaf is in the output, such as ``" at ['loss']"``.

        Empty if the output is a single value, or of a class that does not name its parts.
        """
        try:
            found, _ = tree_flatten_with_path(tree_unflatten(self.leaves, self.spec))
        except ValueError:
            return ""
        path = keystr(found[index][0])
        return f" at {path}" if path else ""

    def without_graph(self) -> Output:
        """Return the same values without their graph, which is as large as a step's."""
        return replace(self, leaves=[_without_graph(leaf) for leaf in self.leaves])


class Undecided(Refused):
    """These samples do not decide; others may."""


class Mismatch(Refused):
    """Numbers of the chunks and of the samples differ by more than the order of sums explains."""


@dataclass(frozen=True, slots=True)
class Criterion:
    """The tolerances of a comparison."""

    outputs: float
    """The largest relative difference of an output."""
    gradients: float | None
    """The largest relative difference of a parameter's gradient; ``None`` to compare
    coefficients."""
    rounding: float
    """The relative difference of an output that rounding explains."""
    scale: float = 1.0
    """The loss scale, so that small gradients do not underflow."""

    @property
    def nudge(self) -> float:
        """A relative change of the weights that is no more than rounding.

        It is four units in the last place. In 16 bits it is half a unit: weights are cast to it.
        """
        return self.rounding / LAST_BITS * (4.0 if self.gradients is not None else 0.5)

    def refuse(self, pieces: Sequence[Digest], expected: Digest, names: Sequence[str]) -> None:
        """Raise ``Mismatch`` unless the chunks' gradients add up to the batch's."""
        if self.gradients is None:
            _refuse_by_coefficients(pieces, expected)
            return
        relative = differences(pieces, expected)
        error, most = max(zip(relative, names, strict=True), default=(0.0, ""))
        if error > self.gradients:
            raise Mismatch(f"the gradients of a split batch differ: {most}'s by {error:.1e}")


STANDARD = 4.0
"""The number of standard errors that a coefficient may differ from 1."""
LAST_BITS = 20
"""The number of units in the last place that rounding may change an output by."""
DOUBLE = Criterion(TOLERANCES.double, TOLERANCES.double, LAST_BITS * torch.finfo(torch.float64).eps)
"""The tolerances in float64."""


def by_coefficients(epsilon: float, scale: float) -> Criterion:
    """Return the tolerances for a model's own precision, whose machine epsilon is ``epsilon``."""
    return Criterion(tolerance(epsilon), None, LAST_BITS * epsilon, scale)


def tolerance(epsilon: float) -> float:
    """Return the relative difference that an output may have in a type with this ``epsilon``."""
    return min(TOLERANCES.coarse, TOLERANCES.epsilons * epsilon)


def _refuse_by_coefficients(pieces: Sequence[Digest], expected: Digest) -> None:
    """Raise ``Mismatch`` unless each chunk has the coefficient 1, whatever rounding adds.

    Raises ``Undecided`` if a chunk's gradient is so small that rounding may explain the difference:
    in 16 bits, the rounding of a large gradient beside it changes its coefficient.
    """
    shares, errors, rest = coefficients(pieces, expected)
    if rest > TOLERANCES.residual:
        raise Mismatch(
            "the gradients of the parts do not add up to those of the whole batch:"
            f" a share of {rest:.1e} is missing"
        )
    rounding, decided = rest * length(expected), True
    for share, error, piece in zip(shares, errors, pieces, strict=False):
        off = abs(share - 1.0)
        if off <= max(TOLERANCES.coefficient, STANDARD * error):
            continue
        if off * length(piece) > rounding:
            raise Mismatch(f"the gradients of a split batch differ: a part's share by {off:.1e}")
        decided = False
    if not decided:
        raise Undecided("rounding may change the gradients by as much as a wrong split")


class Runner:
    """Runs parts of a batch, so that the same samples give the same result each time."""

    def __init__(
        self, forward: Forward, layout: Layout, draws: FixedDraws, weights: ShiftedWeights
    ) -> None:
        self.forward = forward
        self.layout = layout
        self.draws = draws
        self.weights = weights
        self._own = self._start = RandomState.now()
        self.drew_elsewhere = False
        """A forward has drawn with Python's or NumPy's generator."""

    def draw(self, chance: float, seed: int | None) -> None:
        """Let the model draw other numbers from now on, beside those that each sample has.

        ``chance``: as in ``FixedDraws``. ``seed``: of Python's and NumPy's generators; ``None`` for
        their own state.
        """
        self.draws.chance = chance
        self._start = self._own if seed is None else RandomState.seeded(seed)

    def run(self, part: Batch, cut: Cut) -> Output:
        """Return the root's output for the samples of ``part`` in ``cut``."""
        return self.call(part, cut)[0]

    def call(self, part: Batch, cut: Cut) -> tuple[Output, Batch]:
        """Return the root's output, and the arguments after the forward."""
        self.draws.cut = cut
        self._start.restore_elsewhere()
        torch.clear_autocast_cache()  # casts cached without a graph would detach the weights
        whole = cut == (0, self.layout.size(part))
        args, kwargs = part.call(part.leaves if whole else self.layout.select(part, cut))
        output = Output.of(self.forward(*args, **kwargs))
        self.drew_elsewhere |= RandomState.now().elsewhere != self._start.elsewhere
        return output, Batch.of(args, kwargs)


class Whole(NamedTuple):
    """What the samples gave in one piece."""

    output: Output
    gradients: Digest | None
    """``None`` if no output has a gradient."""
    start: Snapshot
    """The state before the forward."""
    after: Snapshot
    """The state after it."""


class Comparison:
    """Compares samples with their chunks; raises ``Refused`` if no rule joins them."""

    def __init__(
        self,
        runner: Runner,
        part: Batch,
        parameters: dict[str, torch.Tensor],
        criterion: Callable[[], Criterion],
        observer: Observer,
    ) -> None:
        """Create a comparison of ``part``.

        Without ``parameters``, only outputs are compared. ``criterion`` is called after a forward,
        which shows the precision that the model computes in.
        """
        self.runner = runner
        self.layout = runner.layout
        self.part = part
        self.parameters = parameters
        self._criterion = criterion
        self.observer = observer
        self.size = self.layout.size(part)
        self.possible: list[list[Join]] = []
        """For each output, the rules that have held so far."""
        self.differentiable: list[bool] = []
        """Which outputs have a gradient."""
        self._labels: list[Labels] = []
        self._divisors: list[Labels] = []
        self.second = False
        """The first point has been compared."""

    @property
    def criterion(self) -> Criterion:
        """The tolerances."""
        return self._criterion()

    @property
    def found(self) -> Layout:
        """The layout with the first rule that has held for each output."""
        pairs = zip(self.possible, self.differentiable, strict=True)
        joins = tuple(replace(joins[0], detached=not differs) for joins, differs in pairs)
        draws = self.runner.draws.drew or self.runner.drew_elsewhere
        return replace(self.layout, joins=joins, draws=draws)

    # --- points ----------------------------------------------------------------------------

    def observed(self) -> None:
        """Read what the first forward has divided by."""
        self._labels = self.observer.labels(self.part, self.layout)
        self._divisors = possible_divisors(self.part, self.layout, self.observer)

    def whole(self, output: Output, start: Snapshot) -> Whole:
        """Run the backward of ``output``, that of all samples; empties its graph."""
        after = Snapshot(self.runner.weights.module)
        values = output.without_graph()
        cotangents = [self._cotangent(index, leaf) for index, leaf in enumerate(values.leaves)]
        gradients = self._gradients(output, cotangents)
        if gradients is not None:
            refuse_changes_in_backward(after, Snapshot(after.module, copies=False))
        return Whole(values, gradients, start, after)

    def first(self, whole: Whole) -> None:
        """Find the rules that hold at the first point, also for a chunk without a graph."""
        self.possible = [self._rules(leaf) for leaf in whole.output.leaves]
        self.differentiable = [
            is_number(leaf) and leaf.requires_grad for leaf in whole.output.leaves
        ]
        if not _finite(whole.output):
            raise Undecided("the model's outputs are not finite")
        cuts = uneven(self.size)
        without = self._without_graph(whole, cuts[0]) if self.parameters else None
        chunks = self._chunks(whole, cuts)
        if without is not None and not self._alike(without, chunks[0]):
            raise Mismatch("the model's output differs without gradients")
        values = [chunk.without_graph() for chunk in chunks]
        self._compare(whole, chunks, cuts)
        self._refuse_undecided(whole, values)

    def again(self, whole: Whole) -> bool:
        """Narrow the rules by a second point; return whether it counts.

        It does not if outputs are not finite. Outputs that were the same for all chunks may differ
        here.
        """
        if not _finite(whole.output):
            return False
        cuts = [(0, 1), (1, self.size)]
        self._compare(whole, self._chunks(whole, cuts), cuts)
        return True

    def in_other_sizes(self, batch: Batch, start: Snapshot) -> None:
        """Narrow the rules by the outputs of the whole ``batch`` and of two parts of it."""
        size = self.layout.size(batch)
        cuts = [(0, self.size), (self.size, size)]
        start.restore()
        with torch.no_grad():
            whole = self.runner.run(batch, (0, size))
            chunks = [self._started(start, batch, cut) for cut in cuts]
        try:
            self.possible = self._holding(whole, chunks, cuts, batch)
        except Refused as refusal:
            raise Mismatch("the model's output differs for parts of another size") from refusal

    def is_chaotic(self, whole: Whole, move: Move) -> bool:
        """Return whether other last bits of the shifted weights make other outputs or gradients."""
        weights = self.runner.weights
        weights.move = last_bits(move, self.criterion.nudge)
        try:
            again = self.whole(self._started(whole.start, self.part, (0, self.size)), whole.start)
        finally:
            weights.move = move
        if not self._alike(again.output, whole.output):
            return True
        if again.gradients is None or whole.gradients is None:
            return False
        limit = self.criterion.gradients
        limit = TOLERANCES.rounding if limit is None else limit / 10
        return mean_difference(again.gradients, whole.gradients) > limit

    def _started(self, start: Snapshot, part: Batch, cut: Cut) -> Output:
        """Run some samples from a state."""
        start.restore()
        return self.runner.run(part, cut)

    def _without_graph(self, whole: Whole, cut: Cut) -> Output:
        with torch.no_grad():
            outcome = attempt_model(lambda: self._started(whole.start, self.part, cut))
        if outcome.failure is not None:
            self._started(whole.start, self.part, cut)  # raises if the model cannot run at all
            raise Refused("the model does not run without gradients, and parts of a batch must")
        return outcome.result()

    def _chunks(self, whole: Whole, cuts: Sequence[Cut]) -> list[Output]:
        """Return the outputs of the chunks, each from the state before the whole."""
        found = []
        for cut in cuts:
            found.append(self._started(whole.start, self.part, cut))
            if found[-1].spec != whole.output.spec:
                raise Refused("the structure of the model's output differs for a part of the batch")
            now = Snapshot(whole.start.module, copies=False)
            refuse_other_changes(whole.start, whole.after, now, self.criterion.outputs)
        return found

    def _compare(self, whole: Whole, chunks: list[Output], cuts: Sequence[Cut]) -> None:
        """Narrow the rules by what chunks gave; raise ``Mismatch`` if gradients do not add up."""
        self.possible = self._holding(whole.output, chunks, cuts, self.part)
        steep = STEEP if self.criterion is DOUBLE else 1.0
        *others, last = (
            self._gradients(chunk, self._shares(whole, cut, steep if cut is cuts[-1] else 1.0))
            for chunk, cut in zip(chunks, cuts, strict=True)
        )
        pieces = [each for each in others if each is not None]
        if whole.gradients is None or not (pieces or last):
            return
        names = self._names(whole.gradients)
        scaled = [] if last is None else [[each / steep for each in last]]
        try:
            self.criterion.refuse([*pieces, *scaled], whole.gradients, names)
        except Mismatch:
            if last is None or steep == 1.0:
                raise
            chunk = self._started(whole.start, self.part, cuts[-1])
            plain = self._gradients(chunk, self._shares(whole, cuts[-1]))
            assert plain is not None, "the chunk had gradients before"
            self.criterion.refuse([*pieces, plain], whole.gradients, names)
            raise Refused(NOT_LINEAR) from None

    def _names(self, gradients: Digest) -> list[str]:
        arguments = len(gradients) - len(self.parameters)
        return [*self.parameters, *["an argument"] * arguments]

    def _alike(self, one: Output, other: Output) -> bool:
        pairs = zip(one.leaves, other.leaves, strict=True)
        return one.spec == other.spec and all(self.close(a, b) for a, b in pairs if is_number(b))

    def _refuse_undecided(self, whole: Whole, chunks: list[Output]) -> None:
        """Raise ``Undecided`` if wrong rules would have passed as well."""
        if not self.parameters:
            return
        columns = zip(*(chunk.leaves for chunk in chunks), strict=True)
        for joins, leaf, column in zip(self.possible, whole.output.leaves, columns, strict=True):
            if joins[0].rows and is_number(leaf) and self._is_turned(joins[0], leaf, column):
                raise Undecided(
                    "the model's outputs are alike for all samples, so the split cannot be verified"
                )
            rules = {join.rule for join in joins}
            means = rules & {Rule.SAMPLES, Rule.TOKENS}
            if Rule.SUM in rules and means and Rule.SAME not in rules:
                raise Undecided(
                    "the model returns zero for every sample, so the split cannot be verified"
                )
        if whole.gradients is not None and not any(bool(g.any()) for g in whole.gradients):
            raise Undecided("no gradient reaches the weights, so the split cannot be verified")

    # --- rules -----------------------------------------------------------------------------

    def _rules(self, leaf: Any) -> list[Join]:
        """Return the rules that an output may have, the most specific first."""
        constant = [Join(Rule.SAME)]
        if not isinstance(leaf, torch.Tensor):
            number = isinstance(leaf, (int, float)) and not isinstance(leaf, bool)
            whole = isinstance(leaf, int)
            return constant + (
                ([Join(Rule.SUM)] if whole else self._mean_rules()) if number else []
            )
        if leaf.ndim == 0 or leaf.shape == (1,):
            if not leaf.is_floating_point() and not leaf.is_complex():
                return [*constant, Join(Rule.SUM)]
            return self._mean_rules() if leaf.requires_grad else [*constant, *self._mean_rules()]
        rules = (Rule.CONCATENATE, Rule.TURNS)
        rows = [Join(rule, dim) for rule in rules for dim in range(leaf.ndim)]
        return rows if leaf.requires_grad else [*rows, *constant]

    def _mean_rules(self) -> list[Join]:
        def counted(labels: Sequence[Labels]) -> list[Join]:
            return [Join(Rule.TOKENS, labels=each) for each in labels]

        plain = [Join(Rule.SAMPLES), Join(Rule.SUM)]
        return [*counted(self._labels), *plain, *counted(self._divisors)]

    def _holding(
        self, whole: Output, chunks: list[Output], cuts: Sequence[Cut], part: Batch
    ) -> list[list[Join]]:
        """Return the rules by which ``chunks`` join to ``whole``, of those that have held."""
        holding = []
        for index, (expected, possible) in enumerate(zip(whole.leaves, self.possible, strict=True)):
            column = [chunk.leaves[index] for chunk in chunks]
            good = [join for join in possible if self._holds(join, part, cuts, column, expected)]
            if not good and not (self.second and possible[0].rule is Rule.SAME):
                size = self.layout.size(part)
                raise Mismatch(_mismatch_text(expected, whole.place(index), size))
            holding.append(good or possible)
        return holding

    def _holds(
        self, join: Join, part: Batch, cuts: Sequence[Cut], column: Sequence[Any], expected: Any
    ) -> bool:
        if join.rows:
            rows, rest = divmod(expected.shape[join.dim], self.layout.size(part))
            if rest or not rows or (rows == 1 and join.rule is Rule.TURNS):
                return False  # with one row a sample both rules are the same
            for value, (start, stop) in zip(column, cuts, strict=True):
                if value.ndim != expected.ndim or value.shape[join.dim] != rows * (stop - start):
                    return False
        weights: list[float] = []
        if join.scalar:
            shares = self.layout.weights(join, part)
            weights = [shares.of(cut) for cut in cuts]
        try:
            values = [_without_graph(each) for each in column]
            return self.close(joined(join, values, cuts, weights), expected)
        except Refused:
            return False

    def close(self, found: Any, expected: Any) -> bool:
        """Return whether two outputs are equal up to the order of sums."""
        return close(found, expected, self.criterion.outputs)

    def _is_turned(self, join: Join, leaf: torch.Tensor, column: Sequence[torch.Tensor]) -> bool:
        """Return whether samples in another order would have passed as well.

        If outputs are almost the same for all samples, they tell them apart only if the chunks'
        outputs are much closer to their own samples'.
        """
        view, dim = join.by_sample(leaf, self.size)
        turned = view.roll(1, dim)
        if not leaf.requires_grad or not self.close(turned, view):
            return False
        apart, size = _distance(turned, view)
        found = joined(join, column, uneven(self.size), [])
        return apart <= max(CLOSER * _distance(found, leaf)[0], size * self.criterion.rounding)

    # --- gradients -------------------------------------------------------------------------

    def _cotangent(self, index: int, leaf: Any) -> torch.Tensor | None:
        """Return the incoming gradient of an output of all samples; ``None`` if it has none.

        At the second point, the first sample's is far larger than the others'. A backward that
        compares the samples of a batch, to leave some out, then differs in a part of the batch.
        """
        if not (isinstance(leaf, torch.Tensor) and leaf.requires_grad):
            return None
        if leaf.numel() == 1:
            return torch.full_like(leaf, self.criterion.scale)
        found = pattern(leaf, 0, 0).mul_(self.criterion.scale * self.size / leaf.numel())
        if self.second and self.criterion is DOUBLE and self.possible[index][0].rows:
            view, dim = self.possible[index][0].by_sample(found, self.size)
            view.select(dim, 0).mul_(LOUD)
        return found

    def _shares(self, whole: Whole, cut: Cut, scale: float = 1.0) -> list[torch.Tensor | None]:
        """Return the incoming gradients of a chunk's outputs: its share of those of the whole.

        They are multiplied by ``scale``.
        """
        shares: list[torch.Tensor | None] = []
        pairs = zip(whole.output.leaves, self.possible, strict=True)
        for index, (leaf, joins) in enumerate(pairs):
            join, cotangent = joins[0], self._cotangent(index, leaf)
            if cotangent is not None and join.rows:
                view, dim = join.by_sample(cotangent, self.size)
                cotangent = join.flat(view.narrow(dim, cut[0], cut[1] - cut[0]))
            elif cotangent is not None and join.scalar:
                weight = self.layout.weights(join, self.part).of(cut)
                cotangent = cotangent * weight if weight else None
            if cotangent is not None and scale != 1.0:
                cotangent = cotangent * scale
            shares.append(cotangent)
        return shares

    def _gradients(
        self, output: Output, cotangents: Sequence[torch.Tensor | None]
    ) -> Digest | None:
        """Return the digest of the gradients of ``output``, and empty it."""
        pairs = [
            (leaf, cotangent)
            for leaf, cotangent in zip(output.leaves, cotangents, strict=True)
            if cotangent is not None and isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        output.leaves.clear()
        if not pairs or not self.parameters:
            return None
        outputs, incoming = [leaf for leaf, _ in pairs], [each for _, each in pairs]
        del pairs
        arguments = [leaf for leaf in self.part.leaves if is_number(leaf) and leaf.requires_grad]
        return self.runner.weights.digest(
            outputs, incoming, [*self.parameters.values(), *arguments]
        )


def _without_graph(leaf: Any) -> Any:
    if not (isinstance(leaf, torch.Tensor) and leaf.requires_grad):
        return leaf
    return leaf.detach().requires_grad_()


def _finite(output: Output) -> bool:
    numbers = [leaf for leaf in output.leaves if is_number(leaf)]
    return all(bool(torch.isfinite(leaf).all()) for leaf in numbers)


def is_number(leaf: Any) -> bool:
    """Return whether an output is a tensor of real or complex numbers."""
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def close(found: Any, expected: Any, tolerance: float) -> bool:
    """Return whether two outputs are equal up to the order of sums."""
    if isinstance(expected, float) and isinstance(found, float):
        return equal(found, expected) or abs(found - expected) <= tolerance * abs(expected)
    if not is_number(expected):
        return equal(found, expected)
    if not is_number(found) or found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    distance, scale = _distance(found.detach(), expected.detach())
    return distance <= tolerance * scale or equal(found, expected)


def _distance(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Return the norm of the difference and the norm of ``expected``, in double precision.

    Both are computed a piece at a time: logits in double precision may need more memory than the
    model.
    """
    exact = torch.complex128 if expected.is_complex() else torch.float64
    norms = []
    pieces = zip(found.reshape(-1).split(PIECE), expected.reshape(-1).split(PIECE), strict=True)
    for one, other in pieces:
        other = other.to(exact)
        norms.append(torch.stack([(one.to(exact) - other).norm(), other.norm()]))
    distance, scale = torch.stack(norms).norm(dim=0).tolist()
    return distance, scale


def uneven(samples: int) -> list[Cut]:
    """Cut 4 samples into 2, 1, 1; fewer samples into ones."""
    first = max(1, samples - 2)
    return [(0, first), *((start, start + 1) for start in range(first, samples))]


def _mismatch_text(expected: Any, place: str, samples: int) -> str:
    if not isinstance(expected, torch.Tensor):
        return f"the model returns a {type(expected).__name__}{place} that depends on the batch"
    if expected.numel() > 1:
        kind = f"a tensor of shape {tuple(expected.shape)} for {samples} samples"
        return f"the model returns {kind}{place} that its parts' outputs do not join to"
    return (
        f"the model returns a number{place} that its parts' outputs do not add up to, neither by"
        " samples nor by a count of its labels"
    )
