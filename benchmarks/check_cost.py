"""What the checks of a plan cost: passes through the model, samples and seconds.

    python benchmarks/check_cost.py                        # every model, prints the table
    python benchmarks/check_cost.py --only lstm --where    # which step of the check runs the model
    python benchmarks/check_cost.py --beside CHECKOUT      # beside another checkout's, in turn
    python benchmarks/check_cost.py --beside CHECKOUT --write    # writes the results

Each check is that of a first plan: nothing is known of the script yet. A *pass* is a forward or a
backward of the whole model. A search runs a check once a process. Its seconds therefore include
what torch does at a first call, such as the choice of kernels.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from verdicts import rooted

from autofit import strategies
from autofit.exceptions import Refused
from autofit.facts import Facts
from autofit.plan import Plan
from autofit.strategies.base import AS_IS
from autofit.worker.harness.batch.layout import Batch
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.harness.session.script_facts import describe
from autofit.worker.harness.torch_state.modules import without_cache
from autofit.worker.harness.verification.plan_check import prove

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
BATCH = 64
"""Samples in a batch of the script."""
ROUNDS = 3
"""Processes of each checkout. The least seconds count: other programs only add to them."""
PLANS = {
    "bf16": {"precision": "bf16"},
    "micro-batch": {"micro_batch": "8"},
    "checkpointing": {"checkpointing": "all"},
    "compile": {"compile": "full"},
}
HELPERS = frozenset({"<lambda>", "_after", "_gradients", "_outputs", "_try", "compare", "run"})
"""Functions of a check that run the model for others."""

Call = dict[str, Any]
Step = tuple[str, str, int, str]
"""``forward`` or ``backward``; the step of the check; samples; data type."""


# --- models ------------------------------------------------------------------------------------


class Lstm(nn.Module):
    """Words to classes of words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        self.lstm = nn.LSTM(128, 256, 2, batch_first=True)
        self.head = nn.Linear(256, 1000)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return (samples, words, classes) scores."""
        scores: torch.Tensor = self.head(self.lstm(self.embedding(words))[0])
        return scores


class Convolutions(nn.Module):
    """Residual blocks under BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(32, 32, 3, padding=1, bias=False),
                nn.BatchNorm2d(32),
                nn.ReLU(),
                nn.Conv2d(32, 32, 3, padding=1, bias=False),
                nn.BatchNorm2d(32),
            )
            for _ in range(8)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Return (samples, classes) scores."""
        pictures = self.stem(pictures)
        for block in self.blocks:
            pictures = torch.relu(pictures + block(pictures))
        scores: torch.Tensor = self.head(pictures.mean((2, 3)))
        return scores


def vit() -> tuple[nn.Module, Call]:
    """Pictures of 64 x 64 and their classes."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=64,
        patch_size=8,
        id2label={label: str(label) for label in range(10)},
    )
    images = torch.randn(BATCH, 3, 64, 64)
    call = {"pixel_values": images, "labels": torch.randint(10, (BATCH,))}
    return ViTForImageClassification(config), call


def bert() -> tuple[nn.Module, Call]:
    """Padded words and a class of each sample, with dropout."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=1000,
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=3,
        intermediate_size=768,
        id2label={label: str(label) for label in range(3)},
    )
    mask = (torch.arange(64) < torch.randint(32, 65, (BATCH, 1))).long()
    call = {
        "input_ids": torch.randint(3, 1000, (BATCH, 64)) * mask,
        "attention_mask": mask,
        "labels": torch.randint(3, (BATCH,)),
    }
    return BertForSequenceClassification(config), call


def decoder() -> tuple[nn.Module, Call]:
    """Words that are their own labels; the loss is computed in the model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2000,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=64,
    )
    words = torch.randint(3, 2000, (BATCH, 64))
    return LlamaForCausalLM(config), {"input_ids": words, "labels": words}


MODELS: dict[str, Callable[[], tuple[nn.Module, Call]]] = {
    "vit": vit,
    "bert": bert,
    "decoder": decoder,
    "cnn with BatchNorm": lambda: (Convolutions(), {"pictures": torch.randn(BATCH, 3, 32, 32)}),
    "lstm": lambda: (Lstm(), {"words": torch.randint(1000, (BATCH, 32))}),
}


# --- counting ----------------------------------------------------------------------------------


def counted(module: nn.Module) -> SimpleQueue[Step]:
    """Count the passes through a module from now on.

    The queue is out of a check's reach: a check puts back what a call of the model changes.
    """
    steps: SimpleQueue[Step] = SimpleQueue()
    plain = type(module)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begins(module: nn.Module, call: Any) -> tuple[str, int, str]:
        samples = next(len(e) for e in tree_leaves(call) if isinstance(e, torch.Tensor))
        told = (asking(), samples, precision(module))
        steps.put(("forward", *told))
        return told

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def ends(output: Any, told: tuple[str, int, str]) -> None:
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        first = next((leaf for leaf in leaves if leaf.requires_grad), None)
        if first is not None:
            first.register_hook(lambda _: steps.put(("backward", *told)))

    @functools.wraps(plain.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        told = begins(self, (args, kwargs))
        output = plain.forward(self, *args, **kwargs)
        ends(output, told)
        return output

    module.__class__ = type(plain.__name__, (plain,), {"forward": forward})
    return steps


def asking() -> str:
    """Return the step of the check that runs the model."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        name = frame.f_code.co_name
        if "verification" in Path(frame.f_code.co_filename).parts and name not in HELPERS:
            return name
    return "elsewhere"


def precision(module: nn.Module) -> str:
    """Return the data type that a module computes in."""
    parameter = next(module.parameters())
    if torch.is_autocast_enabled(parameter.device.type):
        return str(torch.get_autocast_dtype(parameter.device.type)).removeprefix("torch.")
    return str(parameter.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Cost:
    """What one check cost."""

    model: str
    check: str
    seconds: float
    steps: tuple[Step, ...]

    @property
    def passes(self) -> int:
        """Return forward and backward passes together."""
        return len(self.steps)

    @property
    def samples(self) -> int:
        """Return the samples of all passes together."""
        return sum(samples for _, _, samples, _ in self.steps)

    @property
    def double(self) -> int:
        """Return the passes in float64."""
        return sum(dtype == "float64" for _, _, _, dtype in self.steps)


def cost(model: str, check: str, device: str) -> Cost | None:
    """Return what a check costs on a new model; ``None`` where the plan does not apply to it."""
    torch.manual_seed(0)
    module, call = MODELS[model]()
    module.to(device)
    batch = without_cache(module, {name: value.to(device) for name, value in call.items()})
    root = rooted(module)
    root.facts = describe(module, (), batch)
    assert root.facts is not None
    facts, plan = Facts(roots=(root.facts,)), Plan.of(PLANS[check])
    if any(strategy.inapplicable(level, facts) for strategy, level in plan):
        return None
    module(**batch)
    steps = counted(module)
    begun = clock(device)
    try:
        checked(root, plan, batch, facts)
    except Refused as refusal:
        sys.stderr.write(f"{model}, {check}: refused: {refusal}\n")
    seconds = clock(device) - begun
    root.take_back()
    torch.compiler.reset()
    return Cost(model, check, seconds, tuple(steps.get() for _ in range(steps.qsize())))


def checked(root: HarnessRoot, plan: Plan, batch: Call, facts: Facts) -> None:
    """Check a plan as a session does: first how the batch is split, then the rest."""
    if plan["micro_batch"] != AS_IS:
        root.splits.layout(Batch.of((), batch))
    prove(root, plan, (), batch, facts)


def clock(device: str) -> float:
    """Return the seconds by the clock, once the device has nothing left to do.

    On the CPU, return those of the processor: other programs then disturb the figures least.
    """
    if device != "cuda":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


# --- processes and figures -----------------------------------------------------------------------


def costs(models: list[str], device: str) -> list[Cost]:
    """Return what all checks cost here."""
    strategies.compile.SETTINGS = {"backend": "aot_eager"}
    found = (cost(model, check, device) for model in models for check in PLANS)
    return [each for each in found if each is not None]


def costs_of(checkout: Path, models: list[str], device: str) -> list[Cost]:
    """Return what all checks of a checkout cost, in a process of its own."""
    command = [sys.executable, __file__, "--json", "--device", device]
    command += [part for model in models for part in ("--only", model)]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    told = json.loads(run.stdout)
    return [Cost(**{**each, "steps": tuple(map(tuple, each["steps"]))}) for each in told]


def fastest(rounds: list[list[Cost]]) -> list[Cost]:
    """Return the costs of the checks, each from the round that took least."""
    return [min(each, key=lambda cost: cost.seconds) for each in zip(*rounds, strict=True)]


def table(before: list[Cost], now: list[Cost]) -> Iterator[str]:
    """Yield a line of Markdown for each check; ``before`` may be empty."""
    yield "| model | check | passes | of these in float64 | samples in all passes | seconds |"
    yield "|---|---|---|---|---|---|"
    other = {(each.model, each.check): figures(each) for each in before}
    for each in now:
        cells = figures(each)
        if (old := other.get((each.model, each.check))) is not None:
            cells = [f"{was} → {is_}" for was, is_ in zip(old, cells, strict=True)]
        yield f"| {each.model} | {each.check} | {' | '.join(cells)} |"


def figures(cost: Cost) -> list[str]:
    """Return the figures of a check as the table has them."""
    return [str(cost.passes), str(cost.double), str(cost.samples), f"{cost.seconds:.2f}"]


def steps_of(found: list[Cost]) -> Iterator[str]:
    """Yield which steps of each check run the model, and how often."""
    for each in found:
        yield f"{each.model}, {each.check}"
        for (kind, where, samples, dtype), times in Counter(each.steps).items():
            yield f"  {times:3} x {kind:8} of {samples:3} samples, {dtype:8} {where}"


def main() -> None:
    """Count the passes of every check, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", action="append", choices=tuple(MODELS), help="the models to check"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--beside", type=Path, help="another checkout, for comparison")
    parser.add_argument("--where", action="store_true", help="print the steps of each check")
    parser.add_argument("--json", action="store_true", help="print the passes as JSON")
    parser.add_argument("--write", action="store_true", help="write the table to the results")
    options = parser.parse_args()
    models = options.only or list(MODELS)
    torch.set_num_threads(1)
    if options.json or options.where:
        found = costs(models, options.device)
        told = json.dumps([asdict(each) for each in found])
        sys.stdout.write(told if options.json else "\n".join(steps_of(found)) + "\n")
        return
    checkouts = [HERE.parent, *([options.beside] if options.beside else [])]
    rounds = [[costs_of(each, models, options.device) for each in checkouts] for _ in range(ROUNDS)]
    now, *before = (fastest(list(each)) for each in zip(*rounds, strict=True))
    lines = [*table(before[0] if before else [], now), ""]
    machine = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    told = f"Batches of {BATCH} samples, {machine}, one thread, torch {torch.__version__}."
    note = f"Seconds are the least of {ROUNDS} processes."
    lines += [told, f"{note} A → B: the other checkout, then this."]
    sys.stdout.write("\n".join(lines) + "\n")
    if options.write:
        (RESULTS / "check_cost.md").write_text("\n".join(["# What checks cost", "", *lines]) + "\n")


if __name__ == "__main__":
    main()
