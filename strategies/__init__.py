"""All techniques: one file each, and one line in ``REGISTRY``."""

if __name__ == "strategies":
    raise ModuleNotFoundError("import it as autofit.strategies")

from autofit.exceptions import UsageError
from autofit.facts import Facts, Hardware, RootFacts
from autofit.strategies.activation_offload import ActivationOffload
from autofit.strategies.adapters import Adapters
from autofit.strategies.allocator import ExpandableSegments
from autofit.strategies.attention import Attention
from autofit.strategies.base import AS_IS, AUTO, Fidelity, Level, Memory, Number, Strategy, Waste
from autofit.strategies.checkpointing import Checkpointing
from autofit.strategies.compile import Compile
from autofit.strategies.data_loading import DataLoading
from autofit.strategies.gradient_release import GradientRelease
from autofit.strategies.less_data.batch_size import BatchSize
from autofit.strategies.less_data.sequence_length import SequenceLength
from autofit.strategies.loss import ChunkedLoss
from autofit.strategies.memory_format import MemoryFormat
from autofit.strategies.micro_batch import MicroBatch
from autofit.strategies.optimizer import Optimizer
from autofit.strategies.optimizer_offload import OptimizerOffload
from autofit.strategies.padding import Padding
from autofit.strategies.precision import Precision
from autofit.strategies.ranks import Ranks
from autofit.strategies.sharding import Sharding
from autofit.strategies.weights import BF16Weights
from autofit.text import did_you_mean

REGISTRY: tuple[Strategy, ...] = (
    Adapters(),
    Precision(),
    Attention(),
    Checkpointing(),
    ActivationOffload(),
    ChunkedLoss(),
    Optimizer(),
    BF16Weights(),
    OptimizerOffload(),
    GradientRelease(),
    Ranks(),
    Sharding(),
    BatchSize(),
    SequenceLength(),
    MicroBatch(),
    Padding(),
    MemoryFormat(),
    Compile(),
    ExpandableSegments(),
    DataLoading(),
)
"""All strategies, in the order in which a plan names and applies them."""

NAMES: tuple[str, ...] = tuple(strategy.name for strategy in REGISTRY)


def get(name: str) -> Strategy:
    """Return the strategy called ``name``; raise ``UsageError`` with a suggestion if unknown.

    >>> get("precision").level("bf16").summary
    'bfloat16 autocast'
    """
    for strategy in REGISTRY:
        if strategy.name == name:
            return strategy
    owners = [
        strategy.name
        for strategy in REGISTRY
        if name != AS_IS and any(level.name == name for level in strategy.levels)
    ]
    if owners:
        raise UsageError(f"there is no technique {name!r}; it is a level of {' and '.join(owners)}")
    hint = did_you_mean(name, NAMES) or f"there are {', '.join(NAMES)}"
    raise UsageError(f"there is no technique {name!r}; {hint}")


def counting(number: Number) -> Strategy:
    """Return the strategy of which a positive integer is a level that counts ``number``.

    >>> counting(Number.SAMPLES).name
    'micro_batch'
    """
    return next(strategy for strategy in REGISTRY if strategy.number is number)


SPLIT = counting(Number.SAMPLES).name
"""The name of the strategy that splits the batch. The harness does it, and refuses in its name."""
RANKS = counting(Number.RANKS).name
"""The same of the strategy that divides the batch among ranks."""
SHARDING = next(each.name for each in REGISTRY if any(level.shards for level in each.levels))
"""The same of the strategy that shards what ranks would hold alike."""


__all__ = [
    "AS_IS",
    "AUTO",
    "NAMES",
    "RANKS",
    "REGISTRY",
    "SHARDING",
    "SPLIT",
    "Facts",
    "Fidelity",
    "Hardware",
    "Level",
    "Memory",
    "Number",
    "RootFacts",
    "Strategy",
    "Waste",
    "counting",
    "get",
]
