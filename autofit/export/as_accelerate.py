"""Writes a config file for ``accelerate launch --config_file`` with Accelerate's own class.

Only scripts that make an ``Accelerator`` read it. A plan of several ranks sets their number. One
that shards gets a section for FSDP2, or for DeepSpeed under ``zero1``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autofit.analysis.result import Result
from autofit.export.carried import Carried, comments, launched_with, parts, samples_a_device
from autofit.strategies import SPLIT, Number
from autofit.strategies.base import ScriptPart

FSDP = "ACCELERATE_USE_FSDP"
DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
RENAMED = {"fsdp_transformer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap"}
"""Keys of the config file for variables that have another name, in lower case."""
BEFORE = "before accelerator.prepare()"
PARTS = dict.fromkeys((ScriptPart.MODEL, ScriptPart.OPTIMIZER, ScriptPart.LOADER), BEFORE)
"""Where a script with an ``Accelerator`` has what is set by hand."""


def render(result: Result) -> str:
    """Return the file's text, with comments at its top; imports Accelerate."""
    import tempfile

    from accelerate.commands.config.config_args import ClusterConfig

    found = settings(result)
    config = ClusterConfig(**found.fields)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.yaml")
        config.to_yaml_file(str(file))
        text = file.read_text(encoding="utf-8")
    return (
        "\n".join([*comments(result, "Accelerate has no setting for it", found), text.rstrip("\n")])
        + "\n"
    )


def settings(result: Result) -> Carried:
    """Return the fields of Accelerate's ``ClusterConfig`` for the plan of ``result``."""
    found, launched, shards = Carried(parts=PARTS), launched_with(result), result.plan.shards
    fsdp = _fsdp(launched) if FSDP in launched else _fsdp_of(result, found)
    deepspeed = _deepspeed(launched) if DEEPSPEED in launched else _deepspeed_of(result, found)
    found.fields = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _kind(result, fsdp, deepspeed),
        "mixed_precision": launched.get("ACCELERATE_MIXED_PRECISION", "no"),
        "use_cpu": result.hardware.on_host,
        "debug": False,
        "num_processes": result.devices,
        "dynamo_config": {},
        "fsdp_config": fsdp,
        "deepspeed_config": deepspeed,
        "parallelism_config": _groups(result, shards.groups)
        if shards and shards.groups > 1
        else None,
    }
    found.express_settings("accelerate", result, fsdp=fsdp is not None)
    _about_batches(result, found)
    _about_precision(result, found, fsdp, deepspeed)
    return found


def _kind(result: Result, fsdp: object, deepspeed: object) -> str:
    """Return Accelerate's name for how the ranks train together."""
    if fsdp is not None:
        return "FSDP"
    if deepspeed is not None:
        return "DEEPSPEED"
    if result.devices == 1:
        return "NO"
    return "MULTI_CPU" if result.hardware.on_host else "MULTI_GPU"


def _fsdp_of(result: Result, found: Carried) -> dict[str, Any] | None:
    """Return the section for FSDP2 if the plan shards weights."""
    shards = result.plan.shards
    if shards is None or not shards.weights:
        return None
    found.express_shards(result.plan)
    own = result.facts is not None and any(root.transformers for root in result.facts.roots)
    if not own:
        found.notes.append("FSDP gathers the model as one unit. To gather it block by block, set")
        found.notes.append("  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP and the block's class")
        found.notes.append("  in fsdp_transformer_layer_cls_to_wrap.")
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": shards.gathers_twice,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if own else "NO_WRAP",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_offload_params": shards.on_host,
    }


def _groups(result: Result, groups: int) -> dict[str, Any]:
    """Return the section that shards weights within each group of the ranks."""
    name = "parallelism_config_dp"
    return {f"{name}_replicate_size": groups, f"{name}_shard_size": result.devices // groups}


def _deepspeed_of(result: Result, found: Carried) -> dict[str, Any] | None:
    """Return the section for DeepSpeed if the plan shards the optimizer state alone."""
    shards = result.plan.shards
    if shards is None or shards.weights:
        return None
    found.express_shards(result.plan)
    chunks = parts(result)
    if chunks is not None:
        found.express_number(Number.SAMPLES)
    return {
        "zero_stage": 1,
        "gradient_accumulation_steps": chunks or 1,
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
        "zero3_init_flag": False,
    }


def _about_batches(result: Result, found: Carried) -> None:
    """Say what the script has to change, because it makes the loader."""
    plan, size = result.plan, result.measurement.micro_batch
    split = SPLIT in found.strategies
    if plan.ranks > 1:
        found.express_number(Number.RANKS)
        each = size if split else samples_a_device(result)
        found.in_script.append(f"each process takes {each} samples a batch from its loader")
        if not split:
            found.notes.append(
                "DataLoaderConfiguration(split_batches=True), given to the Accelerator, does so."
            )
    if plan.splits and not split:
        found.by_hand |= accumulation(result)
    if result.devices > 1 and result.hardware.on_host:
        found.notes.append("On a CPU, accelerate launch starts one process; only MPI starts more.")


def accumulation(result: Result) -> dict[str, str]:
    """Return how a script splits its batch by the ``Accelerator``; empty if chunks differ."""
    chunks = parts(result)
    if chunks is None:
        return {}
    told = (
        f"DataLoader(batch_size={result.measurement.micro_batch}),"
        f" Accelerator(gradient_accumulation_steps={chunks}), and the training step inside"
        " `with accelerator.accumulate(model):`"
    )
    return {SPLIT: told}


def _about_precision(result: Result, found: Carried, fsdp: object, deepspeed: object) -> None:
    """Say how Accelerate's low precision differs from that of the plan."""
    found.notes.append(
        "Only scripts that make an Accelerator read this file: accelerate launch --config_file."
    )
    low = found.fields["mixed_precision"] if result.plan.autocast else None
    if fsdp is not None and low == "bf16":
        found.notes.append(
            "Under FSDP Accelerate's bf16 gathers weights and reduces gradients in bf16 too."
        )
    if deepspeed is not None and low is not None:
        found.notes.append(f"Under DeepSpeed Accelerate's {low} converts the weights too.")


def _fsdp(launched: dict[str, str]) -> dict[str, Any]:
    """Return the keys and values for the FSDP variables that Accelerate's launcher sets."""
    keys = {n.lower(): value for n, value in launched.items() if n.startswith("FSDP_")}
    return {RENAMED.get(key, key): _value(value) for key, value in keys.items()}


def _deepspeed(launched: dict[str, str]) -> dict[str, Any]:
    start = "ACCELERATE_DEEPSPEED_"
    keys = {
        name.removeprefix(start).lower(): value
        for name, value in launched.items()
        if name.startswith(start)
    }
    renamed = {"config_file": "deepspeed_config_file", "zero3_init": "zero3_init_flag"}
    return {renamed.get(key, key): _value(value) for key, value in keys.items()}


def _value(text: str) -> bool | int | str:
    """Return a variable's value with its type in YAML."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.isdecimal() else text
