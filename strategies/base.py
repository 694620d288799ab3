"""The contract of a strategy. Imports no torch, because the parent process of a search reads it.

A strategy is one technique that trades memory, time or rounding. One line in
``strategies/__init__.py`` registers it. ``tests/strategies/contract.py`` checks these rules for
every registered strategy:

1. Importing a strategy imports no torch. The hooks import torch; they run in the child process.
2. ``levels[0]`` is ``as_is`` and changes nothing. Level names are lower case and unique.
3. ``unavailable`` and ``inapplicable`` return a reason that a user can read, or ``None``. They read
   facts only. The plan check measures whether the level keeps its promise on this model.
4. ``on_root`` changes the root through its handle and returns the undo. After the undo of a level
   with ``undo=True``, no attribute, hook or wrapper is left.
5. ``on_optimizer`` changes one optimizer in the same way. The script's object, groups and schedule
   stay, and a checkpoint has the same form as without autofit.
6. Below ``Fidelity.RECIPE``, outputs, parameter gradients and updates stay the same: up to the
   order of floating-point sums (``EXACT``, and ``REDRAW`` without random draws), or within the
   rounding of the lower precision (``ROUNDING``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, ClassVar, Protocol

from autofit.exceptions import UsageError
from autofit.facts import Facts, Hardware
from autofit.text import did_you_mean

AS_IS = "as_is"
"""The name of every strategy's first level: as the script has it."""

AUTO = "auto"
"""The level of a search whose number each trial finds: see ``Strategy.number``."""

Undo = Callable[[], None]
"""Undoes the change that a hook made."""

Forward = Callable[..., Any]
"""A call of a module, ``(*args, **kwargs) -> output``, with the module bound."""

Wrapper = Callable[[Forward], Forward]
"""Puts something around a forward."""

Stepper = Callable[[Any, Callable[[], None]], None]
"""Steps an optimizer in its own way; called with the optimizer and its plain step."""

View = Callable[[Any, dict[str, Any]], dict[str, Any]]
"""Returns the optimizer state of a parameter as the script sees it: ``(parameter, state)``."""

Context = Callable[[], AbstractContextManager[None]]
"""Makes a context."""

Weights = Callable[[Any, bool], Any | None]
"""Returns the values of a parameter as the script sees them, or ``None`` if it holds them itself.

Called with ``(parameter, here)``; ``here`` asks for a tensor on the parameter's device. Otherwise
the tensor is where it takes the least device memory.
"""

Load = Callable[[Any, Any], None]
"""Stores the values that the script loads into a parameter: ``(parameter, values)``."""


Reader = Callable[[Any, Callable[[], Any]], Any]
"""Returns the next batch of a loader; called with its iterator and the plain ``next``."""


class Fidelity(IntEnum):
    """What a level may change in the training. Ordered: a value allows all smaller ones too."""

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


class Number(StrEnum):
    """What a positive integer counts that is a level; the program itself works with these."""

    SAMPLES = "samples"
    """In the largest chunk of a batch. A trial finds it."""
    BLOCKS = "blocks"
    """Repeated blocks that run again in backward, from the model's input on. A trial finds it."""
    RANKS = "ranks"
    """Processes that train as one."""


class Waste(StrEnum):
    """What a trial has to show before a strategy that lowers this is worth another trial."""

    FRAGMENTATION = "fragmentation"
    """Memory that the allocator holds and cannot use, in a trial that is short of memory."""
    DATA_WAIT = "data wait"
    """Time that the steps wait for their batches."""


class Memory(StrEnum):
    """The kinds of memory a training step holds."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer state"
    ACTIVATIONS = "activations"
    WORKSPACE = "workspace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """How weights, gradients and optimizer state are sharded over ranks."""

    weights: bool = True
    """Whether weights and gradients are sharded too, not the optimizer state alone."""
    gathers_twice: bool = True
    """Whether weights are freed after their forward and gathered again for their backward."""
    groups: int = 1
    """Number of groups of ranks; the ranks of a group hold all weights together."""
    on_host: bool = False
    """Whether shards are kept in host memory, where the optimizer steps them.

    A single process can do that too: it is the only rank then.
    """
    half: bool = False
    """Whether weights are gathered in bfloat16; the shards stay as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A level in the settings of another program, for the export of that name."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """Values by name. A table among them is joined with the tables of other levels."""
    notes: tuple[str, ...] = ()
    """Lines that say how the program does it in another way than autofit."""
    by_hand: str = ""
    """In place of fields: how a script for this program sets the level by hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The training for which another program gets its settings."""

    device: str
    """torch's name of the device's type, such as ``"cuda"``."""
    facts: Facts
    fsdp: bool = False
    """Whether the program shards the weights by FSDP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One setting of a strategy."""

    name: str
    summary: str
    """One line, shown by ``autofit techniques``."""
    fidelity: Fidelity = Fidelity.EXACT
    slowdown: float = 1.0
    """Expected step time relative to ``as_is``. A prior of the cost model, never a verdict.

    The value is near the median of ``benchmarks/results/strategies.json``.
    """
    launches: float | None = None
    """Expected time to launch a step's kernels, relative to ``as_is``; ``None``: ``slowdown``."""
    products: str = ""
    """The type in which it lets a GPU compute matrix products: ``"tf32"`` or ``"half"``; empty if
    it leaves that alone."""
    keeps: float = 1.0
    """Expected share of the memory that remains after the strategy lowers it; also a prior."""
    lowers: frozenset[Memory] | None = None
    """The kinds of memory that it lowers; ``None`` for all that its strategy lowers."""
    setup_seconds: float = 0.0
    """Expected seconds before the first step; the search spreads them over ``--horizon`` steps."""
    made: float = 1.0
    """Share of the weights that a GPU holds while the model is made and does not fit. Below one for
    a level that acts before the model's first call."""
    undo: bool = True
    """Can be undone between two steps, so that one launch measures several plans."""
    alone: bool = False
    """A process can measure one plan with it, because the next could not be checked."""
    replaces_as_is: bool = False
    """Exact, and never slower or larger than ``as_is``: a search tries it in place of that."""
    autocast: str | None = None
    """The dtype in which autocast computes the forward, by torch's name: ``"bfloat16"``."""
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """What it is in other programs, by the names of ``autofit/export``. The export to any other
    program refuses it, or tells what ``by_hand`` says."""
    implies: Mapping[str, str] = field(default_factory=dict)
    """Levels of other strategies that it has the effect of, by strategy. A search adds them."""
    ordered: bool = False
    """Always needs less memory, and more time, than the ordered levels before it. A level that is
    faster too is not, nor one whose effect depends on a number."""
    shards: Shards | None = None
    """How it shards what the ranks would hold alike."""
    contains: str | None = None
    """A level of the same strategy of which it does all and more: refused where that is refused."""
    refines: bool = False
    """A search adds only one such level at a time, to a plan that it has measured. So a new level
    does not multiply the combinations."""


class ScriptPart(StrEnum):
    """The part of a script in which a person sets a level by hand."""

    SCRIPT = "script"
    """Anywhere before training, because it holds for the whole process."""
    MODEL = "model"
    """Where the model has been made, before its optimizer is."""
    OPTIMIZER = "optimizer"
    """Where the optimizer is made."""
    LOADER = "loader"
    """Where the loader of the training data is made."""
    STEP = "step"
    """Where the model is called, and its loss computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByHand:
    """A level set by hand: in words, and in plain PyTorch where that says it."""

    setting: str
    """What to do, with every name and value, in one line. An export that cannot carry the level
    says this, and adds where the framework has that ``part``."""
    part: ScriptPart
    prepare: str = ""
    """Statements on ``model``, once, before training; ``torch`` is imported."""
    blocks: bool = False
    """They need the model's ``blocks``."""
    around: str = ""
    """A context manager around ``model(x)``, as an expression."""
    optimizer: Mapping[str, str] = field(default_factory=dict)
    """Arguments with which the optimizer is made, as code."""
    loader: Mapping[str, str] = field(default_factory=dict)
    """Arguments with which the loader of the training data is made, as code."""
    scaled: bool = False
    """Gradients need a ``torch.amp.GradScaler``."""
    samples: int | None = None
    """The largest chunk in which the model sees the batch."""

    @property
    def in_code(self) -> bool:
        """Whether statements on the model or contexts around its call say all of it."""
        return bool(self.prepare or self.around or self.samples)


class Deferred(ABC):
    """An output of the root that is computed when something uses it.

    It behaves like the tensor that it stands for.
    """

    @abstractmethod
    def value(self) -> Any:
        """Return the tensor, with its graph if any; raise ``Refused`` if it cannot be computed."""

    @abstractmethod
    def detached(self) -> Deferred:
        """Return the same output without a graph; a backward pass through it raises ``Refused``."""

    @abstractmethod
    def joined(self, others: Sequence[Any], dim: int) -> Deferred | None:
        """Concatenate this output and ``others`` along ``dim``; ``None`` if impossible."""


class ProcessHandle(Protocol):
    """The process as a strategy's hook sees it; the harness implements it."""

    @property
    def levels(self) -> Mapping[str, str]:
        """The level of every strategy in the first plan."""

    def around_calls(self, wrapper: Wrapper) -> Undo:
        """Put ``wrapper`` around each call of a model, with or without a plan on it.

        The plan check then compares with calls inside ``wrapper``.
        """

    def show_weights(self, view: Weights, load: Load) -> Undo:
        """Show the script its own values of parameters that are stored in another form."""

    def patch(self, owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> Undo:
        """Replace a function of a class or module of torch by ``make(function)``.

        The undo leaves patches in place that others have made on top.
        """

    def page_weights(self) -> Undo:
        """Keep parameters in parts if they exceed the device before they are sharded."""


class Root(Protocol):
    """The root as a strategy's hooks see it.

    Implemented by ``worker/harness/session/root.py``.
    """

    @property
    def module(self) -> Any:
        """The root ``torch.nn.Module`` itself, unwrapped from ``DistributedDataParallel``."""

    @property
    def levels(self) -> Mapping[str, str]:
        """The level of every strategy in the plan that is being applied."""

    @property
    def strict(self) -> bool:
        """Whether a level must fail rather than fall back, because a trial measures it."""

    def script_mentions(self, *words: str) -> bool:
        """Return whether the user's own code has one of ``words``."""

    def one_size(self) -> Undo:
        """Make all chunks of split calls the same size, if possible."""

    def around_forward(self, wrapper: Wrapper, *, lasting: bool = False) -> Undo:
        """Put ``wrapper`` around each forward of the root, inside any split of the batch.

        ``lasting``: the model needs it. So the check of the split runs inside it too.
        """

    def around_whole(self, wrapper: Wrapper) -> Undo:
        """Put ``wrapper`` around each call of the root, outside any split of the batch."""

    def show_weights(self, view: Weights, load: Load) -> Undo:
        """Show the script its own values of parameters that are stored in another form.

        ``view`` gives the values for ``state_dict``, pickles, copies and the comparison of
        trainings. ``load`` receives the values of ``load_state_dict``. Raises ``Refused`` under
        ``DistributedDataParallel``, which holds references to the parameters.
        """

    def around_call(self, module: Any, wrapper: Wrapper) -> Undo:
        """Put ``wrapper`` around each call of ``module``, a submodule of the root.

        The wrapper is on the module's class, so pickles and copies of the module do not contain
        it. Code that the script compiled does not call it: see ``hides``.
        """

    def changes_of(self, module: Any) -> Callable[[], object]:
        """Return a function whose value differs once ``module`` has changed since its last call.

        It sees other attributes, modules, parameters, hooks and buffers, and other flags of
        parameters. It does not see other values in tensors.
        """

    def hides(self, modules: Iterable[Any]) -> bool:
        """Return whether the script compiled code that calls one of ``modules``."""

    def split(self, micro_batch: int) -> Undo:
        """Run each call of the root in chunks of at most ``micro_batch`` samples.

        Raises ``Refused`` when the probe finds no way to join the chunks' outputs.
        """

    def share(self, ranks: int) -> Undo:
        """Divide each call of the root among the ``ranks`` processes of the launch.

        Raises ``Refused`` if the launch has another number of processes.
        """

    def shard_weights(self, shards: Shards) -> Undo:
        """Shard weights and gradients over the processes among which calls are divided.

        Each process keeps its part from the first training call on. The undo leaves them sharded.
        Raises ``Refused`` if there is one process, unless its part is to be in host memory.
        """

    def taken_back_by(self, undo: Undo) -> None:
        """Register an undo before its change is made, because memory may run out during it."""

    def outliving(self, undo: Undo) -> Undo:
        """Return ``undo``; it is also called when the script drops the model first.

        Use it for changes outside the model.
        """

    def around_next(self, reader: Reader) -> Undo:
        """Let ``reader`` give the next batch of every data loader of the script."""

    def set_aside(self) -> None:
        """Leave the present step out of the measurement, because of one-time work in it."""

    def inside(self) -> AbstractContextManager[None]:
        """Return a context in which no call is taken for a new root."""


class Aside(Protocol):
    """Stores gradients elsewhere until all chunks of the batch have run."""

    def put(self, parameter: Any) -> None:
        """Move ``parameter.grad`` to the store, added to the stored gradient."""

    def bring(self, parameter: Any) -> None:
        """Add the stored gradient, if any, to ``parameter.grad``."""


class OptimizerHandle(Protocol):
    """One optimizer of the script as a strategy's hooks see it.

    Implemented by ``worker/harness/patching/optimizers.py``. Functions
    passed to it must not hold a reference to the optimizer, which would then never be freed.
    """

    @property
    def optimizer(self) -> Any:
        """The ``torch.optim.Optimizer`` itself, without the wrapper of a framework."""

    def modules(self) -> tuple[Any, ...]:
        """Return the roots that have been called so far: none before the first forward."""

    @property
    def in_backward(self) -> bool:
        """Whether the step that is taken now is that of some parameters, in backward."""

    def around_step(self, stepper: Stepper) -> Undo:
        """Let ``stepper`` take each step; a closure has been evaluated before."""

    def step_in_backward(self, aside: Aside | None = None) -> Undo:
        """Step each parameter when its gradient is complete, then free the gradient.

        Each stepper runs with an optimizer that holds only the parameters of this step. If the
        batch is split, ``aside`` stores gradients until the last chunk. The script's own step
        updates the remaining parameters. It raises ``Refused`` if the script could notice the
        difference.
        """

    def show_state(self, view: View) -> Undo:
        """Pass the state through ``view`` in ``state_dict``, in pickles and in copies."""

    def around_pickle(self, context: Context) -> Undo:
        """Pickle and copy the optimizer inside ``context``."""

    def shard_state(self, weights: Shards | None = None) -> Undo:
        """Keep on each rank only the state of the parameters that it steps.

        ``weights``: how the weights are sharded; each rank steps its parts of them.

        Raises ``Refused`` if the launch has one process, or if the optimizer cannot step some
        parameters without the others. The undo leaves the state sharded.
        """


class Replay(Protocol):
    """The tensors of a step of the script, as a prediction changes them for a plan.

    Implemented by ``autofit/inspection/prediction.py``. Its ``lives`` have a NumPy array for each
    column, such as ``size`` in bytes and ``start`` in operations of the step.
    """

    facts: Facts
    lives: Any
    """The tensors, and when each exists and is used, under the levels so far."""
    plain: Any
    """The same of the script as it is, in the precision of the plan."""
    half: bool
    """Whether the model computes in 16 bits."""
    forward: int
    backward: int
    """The first operation of each."""

    @property
    def share(self) -> float:
        """The share of a call's samples that runs at once under the plan."""

    @property
    def returns_loss(self) -> bool:
        """Whether the model computes the loss itself."""

    @property
    def tokens(self) -> int:
        """Bytes of the largest output of the model's head, in a call of the script as it is."""

    def made(self, size: Any, start: Any, end: Any) -> Any:
        """Return further tensors, one an entry, which no block has made."""

    def step_by_parameter(self) -> None:
        """Free the temporary tensors of a step of all parameters at once."""


class Strategy(ABC):
    """One technique. The module's docstring lists the rules for an implementation.

    The first level, ``as_is``, changes nothing. No method is called for it.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line, shown by ``autofit techniques``."""
    source: ClassVar[str]
    """The paper or document that describes the technique."""
    levels: ClassVar[tuple[Level, ...]]
    lowers: ClassVar[frozenset[Memory]] = frozenset()
    """The kinds of memory its levels lower: the cost model's prior."""
    replays: ClassVar[bool] = False
    """A prediction computes its memory from the script's own tensors, without a prior."""
    sized: ClassVar[bool] = False
    """Its effect depends on the batch size. The plan check uses as many samples as fit."""

    remedies: ClassVar[Waste | None] = None
    """What it lowers. It is of use only after the same plan without it has shown such waste."""
    freezes: ClassVar[bool] = False
    """The model's own weights are not trained."""
    number: ClassVar[Number | None] = None
    """What a level counts that is a positive integer. One strategy has each ``Number``."""
    redraws: ClassVar[bool] = False
    """It draws other random numbers in dropout. The plan check runs without random draws."""

    def level(self, name: str) -> Level:
        """Return the level called ``name``; raise ``UsageError`` with a suggestion if unknown."""
        for level in self.levels:
            if level.name == name:
                return level
        plain = name.isascii() and name.isdigit() and name == str(int(name)) and name != "0"
        if self.number is not None and plain:
            return self.numbered(name)
        names = [level.name for level in self.levels]
        unknown = f"{self.name} has no level {name!r}"
        hint = did_you_mean(name, names) or f"it has {', '.join(names)}"
        number = f" or a number of {self.number}" if self.number is not None else ""
        raise UsageError(f"{unknown}; {hint}{number}")

    @property
    def ordered(self) -> tuple[str, ...]:
        """The levels of which each always needs less memory, and more time, than those before."""
        return tuple(level.name for level in self.levels if level.ordered)

    def numbered(self, name: str) -> Level:
        """Return the level that is the positive integer ``name``, if it is a ``number``."""
        raise NotImplementedError(f"{self.name} has no numbers")

    def offered(self, hardware: Hardware, facts: Facts) -> tuple[str, ...]:
        """Return the levels beside ``as_is`` that a search on ``hardware`` considers."""
        return tuple(level.name for level in self.levels[1:])

    def searched(self, level: str) -> str:
        """Return the level of a search that finds ``level``: ``auto`` in place of a number."""
        found = self.number is not None and any(each.name == AUTO for each in self.levels)
        return AUTO if found and level.isdecimal() else level

    def leaner_levels(self, level: str, facts: Facts) -> tuple[str, ...]:
        """Return the levels to which a run may fall back from ``level``.

        They need less memory, and are not expected to be faster.
        """
        now = self.level(level)
        found = (each for each in self.levels if each.keeps < now.keeps)
        return tuple(each.name for each in found if each.slowdown >= max(1.0, now.slowdown))

    def samples(self, level: str, batch: int) -> int:
        """Return how many of ``batch`` samples train under ``level``."""
        return batch

    def drops_samples(self, level: str) -> bool:
        """Return whether ``level`` leaves samples of a large batch out of training."""
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

        ``levels``: the levels of the whole plan; another level may do part of the work, or undo it.
        """
        return self.level(level).keeps if kind in self.lowered(level) else 1.0

    def expected_share(self, level: str, facts: Facts) -> float:
        """Return the expected share of the lowered memory that ``level`` leaves in this script."""
        return self.level(level).keeps

    def extent(self, level: str, facts: Facts) -> float:
        """Return how much of its effect ``level`` has in this script, from 0 to 1.

        A number of blocks has the share of the effect that all blocks have.
        """
        return float(level != AS_IS)

    def expected_slowdown(self, level: str, facts: Facts) -> float:
        """Return the expected step time of ``level`` in this script, relative to ``as_is``."""
        return self.level(level).slowdown

    def expected_setup(self, level: str, facts: Facts) -> float:
        """Return the expected seconds of ``level`` before the first step of this script."""
        return self.level(level).setup_seconds

    def fidelity(self, level: str, facts: Facts | None = None) -> Fidelity:
        """Return what ``level`` may change, given the facts of the script."""
        return self.level(level).fidelity

    def describe(self, level: str) -> str:
        """Return the short name of ``level`` in the text of a plan."""
        return f"{self.name} {level}"

    def unavailable(self, level: str, hardware: Hardware) -> str | None:
        """Return why ``level`` cannot run on ``hardware``, or ``None``."""
        return None

    def inapplicable(self, level: str, facts: Facts) -> str | None:
        """Return why ``level`` has no use for such a script, or ``None``."""
        return None

    def clashes(self, level: str, levels: Mapping[str, str]) -> str | None:
        """Return why ``level`` does not combine with a plan's other ``levels``, or ``None``."""
        return None

    def checkable_call(self, level: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return arguments of the root with which a check of ``level`` is meaningful.

        ``args``, ``kwargs``: those of the present call, which the level may not change at all.
        """
        return args, kwargs

    def fault(self, error: BaseException) -> str | None:
        """Return in one line how a level caused ``error``; ``None`` if it did not."""
        return None

    def by_hand(self, level: str) -> ByHand | None:
        """Return how to set ``level`` by hand; ``None`` if that takes more than a few lines."""
        return None

    def setting(self, level: str, form: str, training: Training) -> Setting | None:
        """Return ``level`` in the settings of another program; ``None`` if that has none for it."""
        return self.level(level).settings.get(form)

    def statements(
        self, level: str, model: str, blocks: str | None, training: Training
    ) -> Sequence[str] | None:
        """Return the lines that set ``level`` on a model of a script, before its optimizer is made.

        ``None`` for those of ``by_hand``. ``model`` and ``blocks`` are code: the latter an
        attribute of the model, ``None`` if the script does not show it. A line may be an import.
        """
        return None

    def environment(self, level: str) -> dict[str, str]:
        """Return the environment variables that must be set before the process starts."""
        return {}

    def around_forward(self, level: str, device: str) -> AbstractContextManager[object] | None:
        """Return a context for the forwards in a loop of the user's own; ``None`` if it has none.

        ``device``: the type of the device.
        """
        return None

    def replay(self, level: str, step: Replay) -> Callable[[], None] | None:
        """Change the tensors of a predicted step as ``level`` does, before the batch is split.

        Returns what to change after the split; ``None`` for nothing.
        """
        return None

    def acts_at_start(self, level: str) -> bool:
        """Return whether ``level`` acts in a process before the model exists."""
        return not self.level(level).undo or type(self).on_process is not Strategy.on_process

    def on_process(self, level: str, process: ProcessHandle) -> Undo | None:
        """Change settings of the process after torch is imported and before any root runs.

        Called for the first plan of a process only; later plans change the root.
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
