"""The contract every strategy keeps. Imports no torch: the search reads it in the parent.

A strategy is one technique that trades memory, time or rounding. It lives in one file, is
registered by one line in ``strategies/__init__.py``, and keeps these promises, which
``tests/strategies/contract.py`` puts to the test for every registered strategy:

1. Importing its file imports no torch; what needs torch is imported inside the hooks, which run
   in the child process that becomes the user's script.
2. ``levels[0]`` is ``as_is``: nothing is changed. Level names are lower case and unique.
3. ``unavailable`` and ``inapplicable`` answer with a reason a user can read, or ``None``. They look
   at facts only; whether the promise *holds* on this model and batch is what the probe measures.
4. ``on_root`` changes the root (through the seams it is given) and returns how to take that back.
   A level that says ``undo`` leaves no trace once taken back: no attribute, hook or wrapper.
5. ``on_optimizer`` changes one optimizer (through the seams it is given) likewise. The script's own
   object, groups and schedule stay what they are, and what it saves is what plain Python saves.
6. Below ``Fidelity.RECIPE`` the outputs, the parameter gradients and the update of a step stay what
   they were: equal up to the order of floating-point sums (``EXACT``, and ``REDRAW`` without random
   draws), or within the lower precision's rounding (``ROUNDING``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, ClassVar, Protocol

from autofit.exceptions import UsageError
from autofit.facts import Facts, Hardware

AS_IS = "as_is"
"""The name of every strategy's first level: as the script has it."""

Undo = Callable[[], None]
"""Takes back what a hook did."""

Forward = Callable[..., Any]
"""A call of a module, ``(*args, **kwargs) -> output``, with the module bound."""

Wrapper = Callable[[Forward], Forward]
"""Puts something around a forward."""

Stepper = Callable[[Any, Callable[[], None]], None]
"""Takes an optimizer's step its own way: called with the optimizer and its plain step."""

View = Callable[[Any, dict[str, Any]], dict[str, Any]]
"""Returns what a parameter's optimizer state looks like to the script: ``(parameter, state)``."""

Weights = Callable[[Any, bool], Any | None]
"""Returns a parameter's values as the script has them, a new tensor; ``None`` if it is plain.

``(parameter, here)``: on the parameter's device, or wherever that takes the least of its memory.
"""

Load = Callable[[Any, Any], None]
"""Takes the values that the script has loaded into a parameter: ``(parameter, values)``."""


Reader = Callable[[Any, Callable[[], Any]], Any]
"""Gives a loader's next batch: called with its iterator and the iterator's own way to it."""


class Fidelity(IntEnum):
    """What a level may change in the training. Ordered: an allowance includes all below it."""

    EXACT = 0
    """The same update, up to the order of floating-point sums."""
    REDRAW = 1
    """The same distribution, other random draws (a split batch under dropout)."""
    ROUNDING = 2
    """The same algorithm in lower precision (TF32, bf16 autocast, 8-bit optimizer state)."""
    RECIPE = 3
    """Other training (another optimizer, LoRA, a smaller effective batch)."""

    def __str__(self) -> str:
        return self.name.lower()


class Memory(StrEnum):
    """The kinds of memory a training step holds."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer state"
    ACTIVATIONS = "activations"
    WORKSPACE = "workspace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One setting of a strategy."""

    name: str
    summary: str
    """One line, shown by ``autofit techniques``."""
    fidelity: Fidelity = Fidelity.EXACT
    slowdown: float = 1.0
    """Step time expected against ``as_is``: a prior for the order of retreat, never a verdict.

    Where it was measured (``benchmarks/results/strategies.json``), near the median of that.
    """
    keeps: float = 1.0
    """Share expected to be left of the memory that the strategy lowers: a prior as well."""
    lowers: frozenset[Memory] | None = None
    """The kinds of memory it lowers, where that is not all that its strategy lowers."""
    setup_seconds: float = 0.0
    """Seconds that it is expected to take before the first step, charged over ``--horizon``."""
    made: float = 1.0
    """Share of the weights that a GPU holds while the model is made, where it has no room for all:
    below one for what does not wait for the model's first call."""
    undo: bool = True
    """Can be taken back at a step boundary, so that several plans are measured in one launch."""
    late: bool = False
    """Cannot be taken back, but can be put in place in a launch that has begun without it."""
    replaces_as_is: bool = False
    """Never slower nor larger than ``as_is``, and exact: a search tries it in its place."""
    refines: bool = False
    """Tried beside plans that a search has measured, one such level at a time, rather than in
    every combination: the catalogue may grow without the searches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByHand:
    """A level as one writes it by hand in plain PyTorch: ``autofit best --format python``."""

    prepare: str = ""
    """Statements on ``model``, once, before training; ``torch`` is imported."""
    blocks: bool = False
    """They need the model's ``blocks``."""
    around: str = ""
    """A context manager around ``model(x)``, as an expression."""
    scaled: bool = False
    """Gradients need a ``torch.amp.GradScaler``."""
    samples: int | None = None
    """The largest chunk in which the model sees the batch."""


class Deferred(ABC):
    """In the root's output in place of a tensor, which is computed when something uses it.

    A level that gives such outputs makes them answer as the tensor would, for scripts that use it.
    """

    @abstractmethod
    def value(self) -> Any:
        """Return the tensor, with its graph where it has one; raise ``Refused`` if it is lost."""

    @abstractmethod
    def detached(self) -> Deferred:
        """Return the same without its graph; that its value is differentiated is then refused."""

    @abstractmethod
    def joined(self, others: Sequence[Any], dim: int) -> Deferred | None:
        """Return this and those of further samples as one, along ``dim``; ``None`` if it cannot."""


class Process(Protocol):
    """The process as a strategy's hook sees it; the harness implements it."""

    def around_calls(self, wrapper: Wrapper) -> Undo:
        """Put ``wrapper`` around each call of a model, also where no plan is applied to it.

        What is proven of a root is then compared with its calls inside ``wrapper``.
        """

    def show_weights(self, view: Weights, load: Load) -> Undo:
        """Let parameters that are kept in another form be what they were to the script."""

    def patch(self, owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> Undo:
        """Replace a function of a class or module of torch by ``make(function)``.

        The undo leaves patches in place that others have made on top.
        """


class Root(Protocol):
    """The root as a strategy's hooks see it: the seams, and nothing else.

    Implemented by ``worker/harness/session/root.py``.
    """

    @property
    def module(self) -> Any:
        """The root ``torch.nn.Module`` itself, unwrapped from ``DistributedDataParallel``."""

    @property
    def strict(self) -> bool:
        """Whether a level is to fail where it would go on as something else: it is measured."""

    def one_size(self) -> Undo:
        """Split calls, where they are split, into chunks of one size, as far as that goes."""

    def around_forward(self, wrapper: Wrapper, *, lasting: bool = False) -> Undo:
        """Put ``wrapper`` around each forward of the root, inside any split of the batch.

        ``lasting``: the model cannot do without; how a batch is split is proven inside it too.
        """

    def around_whole(self, wrapper: Wrapper) -> Undo:
        """Put ``wrapper`` around each call of the root, outside any split of the batch."""

    def show_weights(self, view: Weights, load: Load) -> Undo:
        """Let parameters that are kept in another form be what they were to the script.

        Each passes through ``view`` in ``state_dict``, in pickles, in copies and where a search
        compares trainings; ``load`` takes what ``load_state_dict`` brings. Raises ``Refused``
        where others have made arrangements with the parameters as they are.
        """

    def around_call(self, module: Any, wrapper: Wrapper) -> Undo:
        """Put ``wrapper`` around each call of ``module``, a submodule of the root.

        Done on its class, so that pickling or copying the module carries nothing of ours. Code that
        the script has compiled passes it by: see ``hides``.
        """

    def hides(self, modules: Iterable[Any]) -> bool:
        """Return whether calls of some of ``modules`` are inside what the script has compiled."""

    def split(self, micro_batch: int) -> Undo:
        """Run each call of the root in chunks of at most ``micro_batch`` samples.

        Raises ``Refused`` when the probe finds no way to join the chunks' outputs.
        """

    def before_step(self, hook: Callable[[Any], None]) -> Undo:
        """Call ``hook(optimizer)`` before every optimizer step."""

    def taken_back_by(self, undo: Undo) -> None:
        """Say how a change is taken back before it is made: memory may run out in its midst."""

    def outliving(self, undo: Undo) -> Undo:
        """Return ``undo``, which is called too where the script drops the model before.

        For what changes more than the model.
        """

    def patch(self, owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> Undo:
        """Replace a function of a class or module of torch by ``make(function)``.

        The undo leaves patches in place that others have made on top.
        """

    def around_next(self, reader: Reader) -> Undo:
        """Let ``reader`` give the next batch of every data loader of the script."""

    def set_aside(self) -> None:
        """Keep the step under way out of what is measured: something is done in it once."""

    def inside(self) -> AbstractContextManager[None]:
        """Return a context in which calls are the root's own: no other root is met in it."""


class Aside(Protocol):
    """Keeps gradients elsewhere while more of them are to come."""

    def put(self, parameter: Any) -> None:
        """Take away what ``parameter.grad`` holds, and add it to what was put aside before."""

    def bring(self, parameter: Any) -> None:
        """Add what was put aside, if anything was, to ``parameter.grad``."""


class OptimizerHandle(Protocol):
    """One optimizer of the script as a strategy's hooks see it.

    Implemented by ``worker/harness/patching/optimizers.py``. What is given to it must hold no
    reference to the optimizer, which would otherwise never be freed.
    """

    @property
    def optimizer(self) -> Any:
        """The ``torch.optim.Optimizer`` itself, inside what a framework wraps around it."""

    def modules(self) -> tuple[Any, ...]:
        """Return the roots met so far: none before the first forward."""

    @property
    def in_backward(self) -> bool:
        """Whether the step that is taken now is that of some parameters, in backward."""

    def around_step(self, stepper: Stepper) -> Undo:
        """Let ``stepper`` take each step; a closure has been evaluated before."""

    def step_in_backward(self, aside: Aside | None = None) -> Undo:
        """Let each parameter step as soon as its gradient is complete, and free that.

        Every stepper is called with the optimizer holding this parameter alone. Where a batch is
        split, gradients wait in ``aside`` for those of the last part. A step of the script takes
        what is left; one that could tell the difference raises ``Refused``.
        """

    def show_state(self, view: View) -> Undo:
        """Pass the state through ``view`` in ``state_dict``, in pickles and in copies."""


class Strategy(ABC):
    """One technique; see the module for what an implementation promises.

    Its first level, ``as_is``, changes nothing: no method is asked about it, and no hook gets it.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line, shown by ``autofit techniques``."""
    source: ClassVar[str]
    """The paper or document that describes the technique."""
    levels: ClassVar[tuple[Level, ...]]
    lowers: ClassVar[frozenset[Memory]] = frozenset()
    """The kinds of memory its levels lower: the cost model's prior."""
    removed: ClassVar[Mapping[str, str]] = {}
    """Levels of earlier releases that are gone, each with what to use in its place."""
    sized: ClassVar[bool] = False
    """What it does depends on the size of a batch: it is proven on as many samples as will run."""

    redraws: ClassVar[bool] = False
    """It draws other random numbers where a model drops: proven with nothing drawn."""

    def level(self, name: str) -> Level:
        """Return the level called ``name``; raise ``UsageError`` naming those there are."""
        for level in self.levels:
            if level.name == name:
                return level
        allowed = ", ".join(level.name for level in self.levels)
        unknown = f"{self.name} has no level {name!r}"
        if name in self.removed:
            raise UsageError(f"{unknown}: it was removed in 0.2: use {self.removed[name]}")
        raise UsageError(f"{unknown}; it has {allowed}")

    def samples(self, level: str, batch: int) -> int:
        """Return the samples of a call that train under ``level``, of ``batch``."""
        return batch

    def drops_samples(self, level: str) -> bool:
        """Return whether samples of a large batch do not train under ``level``."""
        large = 1 << 20
        return self.samples(level, large) < large

    def share(self, level: str) -> float:
        """Return the part of each sample that trains under ``level``."""
        return 1.0

    @property
    def changes_models(self) -> bool:
        """Whether it has a hook for models."""
        return type(self).on_root is not Strategy.on_root

    @property
    def changes_optimizers(self) -> bool:
        """Whether it has a hook for optimizers."""
        return type(self).on_optimizer is not Strategy.on_optimizer

    def lowered(self, level: str) -> frozenset[Memory]:
        """Return the kinds of memory that ``level`` lowers."""
        own = self.level(level).lowers
        return self.lowers if own is None else own

    def keeps(self, level: str, kind: Memory, levels: Mapping[str, str]) -> float:
        """Return the share of a kind of memory that ``level`` is expected to leave.

        ``levels``: of the whole plan; what stands beside a level may do part of its work, or undo
        it.
        """
        return self.level(level).keeps if kind in self.lowered(level) else 1.0

    def expected_share(self, level: str, facts: Facts) -> float:
        """Return the share that ``level`` is expected to leave of what it lowers in this script."""
        return self.level(level).keeps

    def expected_slowdown(self, level: str, facts: Facts) -> float:
        """Return the step time expected of ``level`` in this script, against ``as_is``."""
        return self.level(level).slowdown

    def fidelity(self, level: str, facts: Facts | None = None) -> Fidelity:
        """Return what ``level`` may change, given what is known of the script."""
        return self.level(level).fidelity

    def describe(self, level: str) -> str:
        """Return how a plan's line names ``level``: short, as people say it."""
        return f"{self.name} {level}"

    def unavailable(self, level: str, hardware: Hardware) -> str | None:
        """Return why ``level`` cannot run on ``hardware``, or ``None``."""
        return None

    def inapplicable(self, level: str, facts: Facts) -> str | None:
        """Return why ``level`` would do nothing, or harm, on such a script, or ``None``."""
        return None

    def clashes(self, level: str, levels: Mapping[str, str]) -> str | None:
        """Return why ``level`` cannot stand beside a plan's other ``levels``, or ``None``."""
        return None

    def checkable_call(self, level: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return a call of the root on which a proof of ``level`` tells something.

        ``args``, ``kwargs``: of the call at hand, which may be none that the level changes.
        """
        return args, kwargs

    def fault(self, error: BaseException) -> str | None:
        """Return in a line how ``error``, raised under a level, is its doing; ``None`` if not."""
        return None

    def by_hand(self, level: str) -> ByHand | None:
        """Return how ``level`` is written by hand; ``None`` where that takes more than lines."""
        return None

    def environment(self, level: str) -> dict[str, str]:
        """Return what must be in the environment before the process starts."""
        return {}

    def on_process(self, level: str, process: Process) -> Undo | None:
        """Change what is process-wide in torch, once it is imported and before any root runs.

        Called for the first plan of a process; what other plans need they do at the root.
        """
        return None

    def on_root(self, level: str, root: Root) -> Undo | None:
        """Change ``root`` before its forward runs; raise ``Refused`` with the reason if it cannot.

        Returns how to take the change back; ``None`` when there is nothing to take back, or
        ``root.taken_back_by`` has been told.
        """
        return None

    def on_optimizer(self, level: str, handle: OptimizerHandle) -> Undo | None:
        """Change one optimizer between two steps; raise ``Refused`` with the reason if it cannot.

        Returns how to take the change back; ``None`` when there is nothing to take back.
        """
        return None
