"""Writes a Python module with the arguments of ``lightning.Trainer``.

A callback among them sets what ``Trainer`` has no argument for: on the model before its optimizers
are made, and on the optimizers before the first step.
"""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import dedent, indent

from autofit.analysis.result import Result
from autofit.export.as_python import IMPORTS, around, block_search
from autofit.export.carried import Carried, comments, parts, samples_a_device
from autofit.plan import Plan
from autofit.strategies import Number
from autofit.strategies.base import ByHand, ScriptPart, Shards

STRATEGIES = "lightning.pytorch.strategies"
"""The module of Lightning's strategies."""
PARTS = {
    ScriptPart.MODEL: "in setup() of the LightningModule",
    ScriptPart.OPTIMIZER: "in configure_optimizers()",
    ScriptPart.LOADER: "where it is made for Trainer.fit()",
    ScriptPart.STEP: "in training_step()",
}
"""Where a script for Lightning has what is set by hand."""
HEAD = '''\
class Planned(Callback):
    """Sets what Trainer has no argument for."""

    done = False
'''
SETUP = '''
    def setup(self, trainer, module, stage):
        """Change the model before its optimizers are made."""
        if stage != "fit" or self.done:
            return
        self.done = True
        for model in {models}:
'''
OPTIMIZERS = '''
    def on_train_start(self, trainer, module):
        """Set arguments of the optimizers; a state that was loaded moves to where they need it."""
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group.update({arguments})
            if optimizer.state:
                optimizer.load_state_dict(optimizer.state_dict())
'''


def render(result: Result) -> str:
    """Return the module's text: ``ARGUMENTS`` for ``lightning.Trainer(**ARGUMENTS)``."""
    found, callback = settings(result), list(_callback(result))
    by_blocks = any(hand.blocks for hand in _hands(result))
    imports = [IMPORTS.strip()] if by_blocks else ["import torch"] if callback else []
    imports += ["from lightning.pytorch import Callback"] if callback else []
    imports += [f"import {STRATEGIES}"] if STRATEGIES in found.fields.get("strategy", "") else []
    lines = [f'    "{name}": {code},' for name, code in found.fields.items()]
    parts_of_file = [
        "\n".join([*comments(result, "Lightning has no setting for it", found), *imports]),
        *([block_search()] if by_blocks else []),
        *(["".join(callback).rstrip("\n")] if callback else []),
        "\n".join(
            [
                "# lightning.Trainer(**ARGUMENTS, max_epochs=...)",
                *(["# Append the script's own callbacks to the list below."] if callback else []),
                "ARGUMENTS = {",
                *lines,
                "}",
            ]
        ),
    ]
    return ("\n\n\n" if callback else "\n").join(parts_of_file) + "\n"


def settings(result: Result) -> Carried:
    """Return the arguments for the plan of ``result``, each as code, with the callback's."""
    found = arguments(result)
    cpu = result.hardware.on_host
    found.fields = {
        "accelerator": '"cpu"' if cpu else '"gpu"',
        "devices": str(result.devices),
        **found.fields,
    }
    in_callback = _in_callback(result.plan, found)
    if in_callback:
        found.fields["callbacks"] = "[Planned()]"
    for name in in_callback:
        found.express(name)
    return found


def arguments(result: Result) -> Carried:
    """Return the arguments of ``Trainer`` itself for the plan of ``result``, each as code."""
    plan, found = result.plan, Carried(parts=PARTS)
    found.express_settings("lightning", result)
    chunks = parts(result)
    if chunks is not None:
        found.express_number(Number.SAMPLES, {"accumulate_grad_batches": str(chunks)})
    if plan.ranks > 1:
        ddp = {"devices": str(result.devices), "strategy": '"ddp"'}
        found.express_number(Number.RANKS, ddp)
    if plan.shards is not None:
        code = _sharded(plan.shards, result.devices)
        found.express_shards(plan, {"strategy": f"{STRATEGIES}.{code}"})
    if (size := batch_size(result)) is not None:
        found.in_script.append(f"the training DataLoader of each process has batch_size={size}")
    return found


def _sharded(shards: Shards, devices: int) -> str:
    """Return Lightning's strategy that shards in this way, as code."""
    if not shards.weights:
        return "DeepSpeedStrategy(stage=1)"
    kind = "FULL_SHARD" if shards.gathers_twice else "SHARD_GRAD_OP"
    kind = "HYBRID_SHARD" if shards.groups > 1 else kind
    mesh = f", device_mesh=({shards.groups}, {devices // shards.groups})"
    more = (mesh if shards.groups > 1 else "") + (", cpu_offload=True" if shards.on_host else "")
    return f'FSDPStrategy(sharding_strategy="{kind}"{more})'


def batch_size(result: Result) -> int | None:
    """Return the samples in a batch of the script's loader; ``None`` if they stay as they are."""
    if parts(result) is not None:
        return result.measurement.micro_batch
    return samples_a_device(result) if result.plan.ranks > 1 else None


def _in_callback(plan: Plan, found: Carried) -> dict[str, ByHand]:
    """Return the levels that the callback sets, by strategy: those that ``found`` lacks.

    The script itself makes loaders and splits batches.
    """
    hands = {
        strategy.name: hand
        for strategy, level in plan
        if strategy.name not in found.strategies and (hand := strategy.by_hand(level))
    }
    return {
        name: hand for name, hand in hands.items() if hand.prepare or hand.around or hand.optimizer
    }


def _hands(result: Result) -> list[ByHand]:
    return list(_in_callback(result.plan, arguments(result)).values())


def _callback(result: Result) -> Iterator[str]:
    """Yield the parts of the callback's class; none if the plan needs no callback."""
    hands = _hands(result)
    if not hands:
        return
    yield HEAD
    body = [
        *(["blocks = repeated_blocks(model)"] if any(hand.blocks for hand in hands) else []),
        *(dedent(hand.prepare).strip("\n") for hand in hands if hand.prepare),
        *(around(hand.around, "model") for hand in hands if hand.around),
    ]
    if body:
        yield SETUP.format(models=_models(result)) + indent("\n".join(body), " " * 12) + "\n"
    given = {name: code for hand in hands for name, code in hand.optimizer.items()}
    if given:
        pairs = ", ".join(f"{name}={code}" for name, code in given.items())
        yield OPTIMIZERS.format(arguments=pairs)


def _models(result: Result) -> str:
    """Return as code which modules the search has tuned: its roots are known by their classes."""
    names = [root.name for root in result.facts.roots] if result.facts is not None else []
    if not names:
        return "[module]"
    known = ", ".join(f'"{name}"' for name in dict.fromkeys(names))
    return f"[m for m in module.modules() if type(m).__name__ in ({known},)] or [module]"
