"""Compares a few samples with three uneven chunks of them to find the rules of joining."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.utils._pytree import TreeSpec

from autofit.exceptions import Refused
from autofit.strategies.base import Forward
from autofit.worker.harness.batch.layout import Batch, Cut, Join, Labels, Layout, Rule, joined
from autofit.worker.harness.torch_state.pytree import flatten
from autofit.worker.harness.torch_state.reachable_state import equal
from autofit.worker.harness.torch_state.rng import RandomState
from autofit.worker.harness.verification.fixed_draws import FixedDraws
from autofit.worker.harness.verification.gradient_digest import (
    Digest,
    coefficients,
    differences,
    digest,
    length,
    mean_difference,
    pattern,
)
from autofit.worker.harness.verification.loss_weights import (
    Observer,
    Variant,
    possible_divisors,
    variants,
)
from autofit.worker.harness.verification.perturbation import last_bits_perturbed
from autofit.worker.harness.verification.tolerances import TOLERANCES
from autofit.worker.oom.attempt import attempt, attempt_model

PIECE = 1 << 24
"""The number of entries that are compared at a time."""
CLOSER = 10
"""An output must be this many times closer to its own sample's output than to another sample's."""
Candidates = list[list[Join]]
"""The rules that may still hold, for each output."""


@dataclass(frozen=True, slots=True)
class Output:
    """A root's flattened output."""

    leaves: list[Any]
    spec: TreeSpec

    @classmethod
    def of(cls, value: Any) -> Output:
        """Flatten a root's output."""
        return cls(*flatten(value))

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
SINGLE = Criterion(
    TOLERANCES.single_outputs,
    TOLERANCES.single_gradients,
    LAST_BITS * torch.finfo(torch.float32).eps,
)
"""Tolerances in float32, where the order of sums makes a difference."""
DOUBLE = Criterion(TOLERANCES.double, TOLERANCES.double, LAST_BITS * torch.finfo(torch.float64).eps)
"""The same in float64."""


def _refuse_by_coefficients(pieces: Sequence[Digest], expected: Digest) -> None:
    """Raise ``Mismatch`` unless each chunk has the coefficient 1, whatever rounding adds.

    Raises ``Undecided`` if a chunk's gradient is so small that rounding may explain the difference:
    in 16 bits, the rounding of a large gradient beside it changes its coefficient.
    """
    shares, errors, rest = coefficients(pieces, expected)
    if rest > TOLERANCES.residual:
        raise Mismatch(f"the gradients of a split batch differ: {rest:.1e} is of no part")
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

    def __init__(self, forward: Forward, layout: Layout, draws: FixedDraws | None) -> None:
        self.forward = forward
        self.layout = layout
        self._draws = draws
        self._start = RandomState.now()

    def run(self, part: Batch, cut: Cut) -> Output:
        """Return the root's output for the samples of ``part`` in ``cut``."""
        if self._draws is not None:
            self._draws.cut = cut
            self._start.restore_elsewhere()
        torch.clear_autocast_cache()  # casts cached without a graph would detach the weights
        args, kwargs = part.call(self.layout.select(part, cut))
        return Output.of(self.forward(*args, **kwargs))


@dataclass(slots=True)
class Progress:
    """What a search for the rules has settled, so that float64 can decide the rest alone."""

    candidates: Candidates | None = None
    """The rules that hold on a few samples and their variants; ``None`` until they are known."""
    differentiable: list[bool] = field(default_factory=list)
    """Which outputs have a gradient."""
    alike: list[list[Join]] = field(default_factory=list)
    """For each output, the rules by which samples in another order would have passed as well."""
    sizes: bool = False
    """The candidates hold for the whole batch too."""
    gradients: bool = False
    """The gradients of the samples add up."""
    unchecked: list[int] = field(default_factory=list)
    """The variants whose gradients have yet to be compared, by their positions."""


class Comparison:
    """Finds the rules; raises ``Refused`` if none hold."""

    def __init__(
        self,
        runner: Runner,
        part: Batch,
        whole: Batch,
        parameters: Mapping[str, torch.Tensor],
        criterion: Criterion,
        observer: Observer,
    ) -> None:
        """Create a comparison of ``part``, a few samples of ``whole``.

        Without ``parameters``, only outputs are compared.
        """
        self.runner = runner
        self.layout = runner.layout
        self.part = part
        self.whole = Batch([_detached(leaf) for leaf in whole.leaves], whole.spec)
        self.parameters = parameters
        self.criterion = criterion
        self.size = self.layout.size(part)
        self.cuts = uneven(self.size)
        self.observer = observer
        self.labels = observer.labels(part, self.layout)
        self.divisors = possible_divisors(part, self.layout, observer)

    def find(self, progress: Progress) -> Layout:
        """Return the layout with a rule for each output.

        ``progress``: what an earlier search has settled; this search settles the rest.
        """
        if progress.candidates is None:
            self._settle_candidates(progress)
        assert progress.candidates is not None
        if not progress.sizes:
            progress.candidates = self._same_in_all_sizes(progress.candidates)
            progress.sizes = True
        joins = tuple(map(self._choose, progress.candidates, progress.differentiable))
        layout = replace(self.layout, joins=joins)
        if self.parameters:
            self._settle_gradients(layout, progress)
            self._refuse_alike(layout, progress)
        return layout

    def _settle_candidates(self, progress: Progress) -> None:
        """Find the rules that hold on the few samples and on their variants."""
        whole, chunks = self._expected()
        candidates = [self._possible(leaf) for leaf in whole.leaves]
        try:
            candidates = self._holding(candidates, self.part, whole, chunks)
        except Mismatch:
            self._refuse_without_graph(whole)
            raise
        differentiable = [is_number(leaf) and leaf.requires_grad for leaf in whole.leaves]
        alike = [
            [join for join in joins if differs and self._is_alike(join, leaf, column)]
            for leaf, differs, joins, column in zip(
                whole.leaves, differentiable, candidates, _columns(chunks), strict=True
            )
        ]
        unchanged, unchecked = chunks[:-1], []
        del whole, chunks
        for index, variant in enumerate(self._variants()):
            try:
                narrower = self._holding_on_variant(candidates, variant.batch, unchanged)
            except Mismatch:
                if not variant.shows or self.criterion is SINGLE:
                    raise
                continue  # a batch with this trait is verified when it comes
            if narrower is not None:
                candidates = narrower
                unchecked += [index] if variant.masked else []
        progress.candidates, progress.differentiable = candidates, differentiable
        progress.alike, progress.unchecked = alike, unchecked

    def _settle_gradients(self, layout: Layout, progress: Progress) -> None:
        """Compare the gradients of the samples and of those variants that have other labels.

        A variant is cut in two: the samples that are not changed, and the last one.
        """
        if not progress.gradients:
            self._check_gradients(layout, self.part, self.cuts)
            progress.gradients = True
        last = self.cuts[-1]
        for index, variant in enumerate(self._variants()):
            if index in progress.unchecked:
                self._check_gradients(layout, variant.batch, [(0, last[0]), last])
                progress.unchecked.remove(index)

    def _variants(self) -> Iterator[Variant]:
        return variants(self.part, self.whole, self.layout, self.labels, self.observer)

    def verify_again(self) -> None:
        """Raise ``Refused`` unless all rules of the layout hold here too, by outputs and gradients.

        Unlike ``confirm``, this counts outputs that are the same for all chunks.
        """
        whole, expected = self._with_gradients(self.layout, self.part, (0, self.size))
        if not _finite(whole):
            raise Undecided("the model's outputs are not finite")
        self._add_up(whole, expected, constants=True)

    def confirm(self) -> None:
        """Raise ``Mismatch`` unless the layout's own rules hold here too.

        Outputs that were the same for all chunks may differ here. If an output is not finite or has
        no gradient, the samples do not count. Raises ``Undecided`` if the last bits of the weights
        make as much difference, as attention over two words can in many layers.
        """
        try:
            self._confirm()
        except Mismatch:
            if self.criterion is not SINGLE and self._is_chaotic():
                raise Undecided("the last bits of the weights decide what is returned") from None
            raise

    def _is_chaotic(self) -> bool:
        """Return whether other last bits of the weights make other outputs or gradients."""
        whole = (0, self.size)
        with torch.no_grad() if self.criterion is DOUBLE else nullcontext():  # outputs are enough
            expected, gradients = self._with_gradients(self.layout, self.part, whole)
            with last_bits_perturbed(self.parameters.values(), self.criterion.nudge):
                found, others = self._with_gradients(self.layout, self.part, whole)
        if not all(map(self.close, found.leaves, expected.leaves)):
            return True
        if gradients is None or others is None:
            return False
        return mean_difference(others, gradients) > TOLERANCES.rounding

    def _confirm(self) -> None:
        whole, expected = self._with_gradients(self.layout, self.part, (0, self.size))
        if _finite(whole):
            self._add_up(whole, expected, constants=False)

    def _add_up(self, whole: Output, expected: Digest | None, *, constants: bool) -> None:
        """Raise ``Mismatch`` unless the chunks add up to the samples, by outputs and gradients.

        ``constants``: also compare outputs that the layout takes from the first chunk.
        """
        found = [self._with_gradients(self.layout, self.part, cut) for cut in self.cuts]
        columns = _columns([chunk for chunk, _ in found])
        for join, leaf, column in zip(self.layout.joins, whole.leaves, columns, strict=True):
            compared = constants or join.rule is not Rule.SAME
            if compared and not self._holds(join, self.part, self.cuts, column, leaf):
                raise Mismatch(_mismatch_text(leaf))
        self._compare_gradients(expected, [gradients for _, gradients in found])

    def _expected(self) -> tuple[Output, list[Output]]:
        """Return the outputs of the samples with a graph, and those of their chunks without one.

        The comparison of both also shows whether the model answers alike without a graph.
        """
        whole = self.runner.run(self.part, (0, self.size)).without_graph()
        with torch.no_grad():
            return whole, self._chunks(whole, self.part, self.cuts)

    def _refuse_without_graph(self, whole: Output) -> None:
        with torch.no_grad():
            again = self.runner.run(self.part, (0, self.size))
        for one, other in zip(again.leaves, whole.leaves, strict=True):
            if is_number(other) and not (is_number(one) and self.close(one, other)):
                raise Mismatch("the model answers differently without gradients")

    def _holding_on_variant(
        self, candidates: Candidates, part: Batch, unchanged: Sequence[Output]
    ) -> Candidates | None:
        """Return the rules that hold on a variant; ``None`` if the model cannot run on it.

        ``unchanged``: the outputs of all chunks but the last, which alone differs.
        """
        with torch.no_grad():
            outcome = attempt_model(lambda: self._run_variant(part))
        if outcome.failure is not None or (found := outcome.result()) is None:
            return None
        whole, last = found
        return self._holding(candidates, part, whole, [*unchanged, *last])

    def _run_variant(self, part: Batch) -> tuple[Output, list[Output]] | None:
        """Return the outputs of a variant and of its last chunk; ``None`` if not finite."""
        whole = self.runner.run(part, (0, self.size))
        return (whole, self._chunks(whole, part, self.cuts[-1:])) if _finite(whole) else None

    def _chunks(self, whole: Output, part: Batch, cuts: Sequence[Cut]) -> list[Output]:
        """Return the outputs of some chunks of ``part``, whose output is ``whole``."""
        chunks = [self.runner.run(part, cut).without_graph() for cut in cuts]
        if any(chunk.spec != whole.spec for chunk in chunks):
            raise Refused("the model's output has another structure for a part of the batch")
        return chunks

    # --- rules -----------------------------------------------------------------------------

    def _possible(self, leaf: Any) -> list[Join]:
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
        return [*counted(self.labels), *plain, *counted(self.divisors)]

    def _holding(
        self,
        candidates: Candidates,
        part: Batch,
        whole: Output,
        chunks: Sequence[Output],
        cuts: Sequence[Cut] = (),
    ) -> Candidates:
        """Return the candidates by which ``chunks`` join to ``whole``."""
        holding = []
        for index, (expected, possible) in enumerate(zip(whole.leaves, candidates, strict=True)):
            column = [chunk.leaves[index] for chunk in chunks]
            arguments = (part, cuts or self.cuts, column, expected)
            good = [join for join in possible if self._holds(join, *arguments)]
            if not good:
                raise Mismatch(_mismatch_text(expected))
            holding.append(good)
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
            return self.close(joined(join, column, cuts, weights), expected)
        except Refused:
            return False

    def _same_in_all_sizes(self, candidates: Candidates) -> Candidates:
        """Return the rules that hold for the whole batch and for chunks of all sizes.

        Only outputs are compared, without a graph. If the whole batch does not fit in memory, half
        of it is compared, and so on.
        """
        if not self.parameters:
            return candidates
        size = self.layout.size(self.whole)
        while size > self.size:
            part = Batch(self.layout.select(self.whole, (0, size)), self.whole.spec)
            run = partial(self._holding_on, candidates, part, growing(self.size, size))
            try:
                outcome = attempt(run)
            except Refused as refusal:
                raise Mismatch("the model's output differs for parts of another size") from refusal
            if outcome.fits:
                return outcome.result()
            size //= 2
        return candidates

    def _holding_on(self, candidates: Candidates, part: Batch, cuts: Sequence[Cut]) -> Candidates:
        """Return the candidates that hold for ``part`` in the chunks ``cuts``, by outputs only."""
        with torch.no_grad():
            whole = self.runner.run(part, (0, self.layout.size(part)))
            return self._holding(candidates, part, whole, self._chunks(whole, part, cuts), cuts)

    def _choose(self, holding: list[Join], differentiable: bool) -> Join:
        rules = {join.rule for join in holding}
        if Rule.SUM in rules and rules & {Rule.SAMPLES, Rule.TOKENS} and Rule.SAME not in rules:
            raise Undecided(
                "the model returns zero for every sample, so the split cannot be verified"
            )
        return replace(holding[0], detached=not differentiable)

    def close(self, found: Any, expected: Any) -> bool:
        """Return whether two outputs are equal up to the order of sums."""
        return close(found, expected, self.criterion.outputs)

    # --- gradients -------------------------------------------------------------------------

    def _is_alike(self, join: Join, leaf: torch.Tensor, column: Sequence[torch.Tensor]) -> bool:
        """Return whether samples in another order would have passed as well.

        If a sum is almost the same for all samples, it tells them apart only if the chunks' outputs
        are much closer to their own samples'.
        """
        if not join.rows:
            return False
        view, dim = join.by_sample(leaf, self.size)
        turned = view.roll(1, dim)
        if not self.close(turned, view):
            return False
        apart, size = _distance(turned, view)
        rounding = size * self.criterion.rounding
        found = joined(join, column, self.cuts, [])
        return apart <= max(CLOSER * _distance(found, leaf)[0], rounding)

    def _refuse_alike(self, layout: Layout, progress: Progress) -> None:
        for join, alike in zip(layout.joins, progress.alike, strict=True):
            if not join.detached and join in alike:
                raise Undecided(
                    "the model's outputs are alike for all samples, so the split cannot be verified"
                )

    def _check_gradients(self, layout: Layout, part: Batch, cuts: Sequence[Cut]) -> None:
        whole, *found = [
            self._gradients(self.runner.run(part, cut), layout, part, cut)
            for cut in [(0, self.size), *cuts]
        ]
        self._compare_gradients(whole, found)
        if part is self.part and whole is not None and not any(map(_reaches, whole)):
            raise Undecided("no gradient reaches the weights, so the split cannot be verified")

    def _compare_gradients(self, expected: Digest | None, found: Sequence[Digest | None]) -> None:
        """Raise ``Mismatch`` unless the chunks' gradients add up to those of the samples."""
        pieces = [each for each in found if each is not None]
        if expected is None or not pieces:
            return
        arguments = len(expected) - len(self.parameters)
        self.criterion.refuse(pieces, expected, [*self.parameters, *["an argument"] * arguments])

    def _with_gradients(
        self, layout: Layout, part: Batch, cut: Cut
    ) -> tuple[Output, Digest | None]:
        """Return the output of some samples, and the digest of their gradients.

        The digest is ``None`` if no output has a gradient.
        """
        output = self.runner.run(part, cut)
        return output.without_graph(), self._gradients(output, layout, part, cut)

    def _gradients(self, output: Output, layout: Layout, part: Batch, cut: Cut) -> Digest | None:
        """Return the digest of the gradients of some samples; empties their ``output``."""
        outputs, cotangents = self._incoming(output, layout, part, cut)
        output.leaves.clear()
        if not outputs:
            return None
        arguments = [leaf for leaf in part.leaves if is_number(leaf) and leaf.requires_grad]
        return digest(outputs, cotangents, [*self.parameters.values(), *arguments])

    def _incoming(
        self, output: Output, layout: Layout, part: Batch, cut: Cut
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the outputs with a gradient that count, and the incoming gradient of each."""
        outputs, cotangents = [], []
        for leaf, join in zip(output.leaves, layout.joins, strict=True):
            if not (isinstance(leaf, torch.Tensor) and leaf.requires_grad):
                continue
            weight = layout.weights(join, part).of(cut) if join.scalar else None
            if weight == 0.0:
                continue
            outputs.append(leaf)
            if weight is not None:
                cotangents.append(torch.full_like(leaf, weight))
            else:
                view, dim = join.by_sample(leaf, cut[1] - cut[0])
                cotangents.append(join.flat(pattern(view, dim, cut[0])))
        return outputs, [cotangent.mul_(self.criterion.scale) for cotangent in cotangents]


def _without_graph(leaf: Any) -> Any:
    if not (isinstance(leaf, torch.Tensor) and leaf.requires_grad):
        return leaf
    return leaf.detach().requires_grad_()


def _columns(outputs: Sequence[Output]) -> list[list[Any]]:
    """Return, for each output of the model, its values in all chunks."""
    return [list(column) for column in zip(*(each.leaves for each in outputs), strict=True)]


def _reaches(gradient: torch.Tensor) -> bool:
    return bool(gradient.any())


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


def growing(first: int, samples: int) -> list[Cut]:
    """Cut so that chunks of ``first``, twice ``first``, four times ``first``, ... samples occur."""
    bounds = [0, first]
    while bounds[-1] < samples:
        bounds.append(min(2 * bounds[-1], samples))
    return list(pairwise(bounds))


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _mismatch_text(expected: Any) -> str:
    if not isinstance(expected, torch.Tensor):
        return f"the model returns a {type(expected).__name__} that depends on the batch"
    kind = "a number" if expected.numel() == 1 else f"a tensor of shape {tuple(expected.shape)}"
    return f"the model returns {kind} that its parts' outputs do not add up to"
