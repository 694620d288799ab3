"""Writes DeepSpeed's config file, for ``deepspeed --deepspeed_config`` and for Trainer.

The script itself has to call ``deepspeed.initialize``. Batch sizes, sharding and precision are
DeepSpeed's own; the optimizer stays that of the script.
"""

from __future__ import annotations

import json
from typing import Any

from autofit.analysis.result import Result
from autofit.export.carried import Carried, parts, samples_a_device
from autofit.strategies import AS_IS
from autofit.strategies.base import ScriptPart

STAGES = {AS_IS: 0, "zero1": 1, "zero2": 2, "full": 3, "full_offload": 3}
"""ZeRO's stage for each level of ``sharding``. Stage 2 also shards gradients only."""

PARTS = dict.fromkeys((ScriptPart.MODEL, ScriptPart.OPTIMIZER), "before deepspeed.initialize()")
"""Where a script for DeepSpeed has what is set by hand."""


def render(result: Result) -> str:
    """Return the config as indented JSON. JSON has no comments: nothing is said in the file."""
    return json.dumps(settings(result).fields, indent=2) + "\n"


def settings(result: Result) -> Carried:
    """Return the fields for the plan of ``result``."""
    plan, found, chunks = result.plan, Carried(parts=PARTS), parts(result)
    found.strategies.discard("allocator")  # a file without comments cannot name the variable
    found.fields["train_batch_size"] = result.measurement.effective_batch
    here = samples_a_device(result) if chunks is None else result.measurement.micro_batch
    found.fields["train_micro_batch_size_per_gpu"] = here
    found.fields["gradient_accumulation_steps"] = chunks or 1
    if chunks is not None:
        found.express("micro_batch")
    if plan["ranks"] != AS_IS:
        found.express("ranks")
    if plan["sharding"] in STAGES:
        found.express("sharding", {"zero_optimization": _zero(plan["sharding"])})
    if plan["sharding"] == "full_offload":
        found.fields["zero_force_ds_cpu_optimizer"] = (
            False  # the script's own optimizer steps there
        )
    if plan["precision"] == "bf16":
        # The section bf16 would convert the weights. The plan's autocast keeps them in float32.
        autocast = {"enabled": True, "dtype": "bfloat16"}
        found.express("precision", {"torch_autocast": autocast})
    found.fields["zero_allow_untested_optimizer"] = True
    return found


def _zero(sharding: str) -> dict[str, Any]:
    zero = {"stage": STAGES[sharding], "overlap_comm": True, "contiguous_gradients": True}
    on_host = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    return {**zero, **on_host} if sharding == "full_offload" else zero


def of_trainer(result: Result) -> dict[str, Any]:
    """Return the config for ``TrainingArguments``, which fills in what it knows itself."""
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    own = settings(result).fields
    return {name: "auto" if name in sizes else value for name, value in own.items()}
