"""Writes DeepSpeed's config file, for ``deepspeed --deepspeed_config`` and for Trainer.

The script itself has to call ``deepspeed.initialize``. Batch sizes, sharding and precision are
DeepSpeed's own; the optimizer stays that of the script.
"""

from __future__ import annotations

import json
from typing import Any

from autofit.analysis.result import Result
from autofit.export.carried import Carried, parts, samples_a_device
from autofit.strategies import Number
from autofit.strategies.base import ScriptPart, Shards

PARTS = dict.fromkeys((ScriptPart.MODEL, ScriptPart.OPTIMIZER), "before deepspeed.initialize()")
"""Where a script for DeepSpeed has what is set by hand."""


def render(result: Result) -> str:
    """Return the config as indented JSON. JSON has no comments: nothing is said in the file."""
    return json.dumps(settings(result).fields, indent=2) + "\n"


def settings(result: Result) -> Carried:
    """Return the fields for the plan of ``result``."""
    plan, found, chunks = result.plan, Carried(parts=PARTS, comments=False), parts(result)
    found.fields["train_batch_size"] = result.measurement.effective_batch
    here = samples_a_device(result) if chunks is None else result.measurement.micro_batch
    found.fields["train_micro_batch_size_per_gpu"] = here
    found.fields["gradient_accumulation_steps"] = chunks or 1
    if chunks is not None:
        found.express_number(Number.SAMPLES)
    if plan.ranks > 1:
        found.express_number(Number.RANKS)
    shards = plan.shards
    if shards is None or shards.groups == 1:
        found.fields["zero_optimization"] = _zero(shards)
        found.express_shards(plan)
    if shards is not None and shards.on_host:  # the script's own optimizer steps there
        found.fields["zero_force_ds_cpu_optimizer"] = False
    found.express_settings("deepspeed", result)
    found.fields["zero_allow_untested_optimizer"] = True
    return found


def _zero(shards: Shards | None) -> dict[str, Any]:
    """Return the section of ZeRO. Stage 2 shards the optimizer state and gradients only."""
    stage = 0 if shards is None else 1 if not shards.weights else 3 if shards.gathers_twice else 2
    zero = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    on_host = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    return {**zero, **on_host} if shards is not None and shards.on_host else zero


def of_trainer(result: Result) -> dict[str, Any]:
    """Return the config for ``TrainingArguments``, which fills in what it knows itself."""
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    own = settings(result).fields
    return {name: "auto" if name in sizes else value for name, value in own.items()}
