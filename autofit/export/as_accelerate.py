"""Writes a config file for ``accelerate launch --config_file`` with Accelerate's own class.

Only scripts that make an ``Accelerator`` read it. A plan of several ranks sets their number. One
that shards gets a section for FSDP2, or for DeepSpeed under ``zero1``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autofit.analysis.result import Result
from autofit.export.carried import Carried, comments, parts, samples_a_device
from autofit.export.header import launched_with
from autofit.strategies import AS_IS
from autofit.strategies.base import ScriptPart
from autofit.strategies.precision import AUTOCAST

FSDP = "ACCELERATE_USE_FSDP"
DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
RENAMED = {"fsdp_transformer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap"}
"""Keys of the config file for variables that have another name, in lower case."""
IN_FSDP = ("zero2", "full", "hybrid", "full_offload")
"""Levels of ``sharding`` that FSDP2 has too."""
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
    plan, found, launched = result.plan, Carried(parts=PARTS), launched_with(result)
    precision = launched.get("ACCELERATE_MIXED_PRECISION", "no")
    if plan["precision"] in AUTOCAST:
        precision = plan["precision"]
        found.express("precision")
    dynamo: dict[str, Any] = {}
    if plan["compile"] in ("regional", "full"):
        regional = plan["compile"] == "regional"
        dynamo = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": regional}
        found.express("compile")
        found.notes.append("Compiled dropout draws Inductor's own random numbers.")
    fsdp = _fsdp(launched) if FSDP in launched else _fsdp_of(result, found)
    if fsdp is not None and plan["checkpointing"] == "all":
        fsdp["fsdp_activation_checkpointing"] = True
        found.express("checkpointing")
    deepspeed = _deepspeed(launched) if DEEPSPEED in launched else _deepspeed_of(result, found)
    found.fields |= {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _kind(result, fsdp, deepspeed),
        "mixed_precision": precision,
        "use_cpu": result.hardware.device == "cpu",
        "debug": False,
        "num_processes": result.devices,
        "dynamo_config": dynamo,
        "fsdp_config": fsdp,
        "deepspeed_config": deepspeed,
        "parallelism_config": _halves(result) if plan["sharding"] == "hybrid" else None,
    }
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
    return "MULTI_CPU" if result.hardware.device == "cpu" else "MULTI_GPU"


def _fsdp_of(result: Result, found: Carried) -> dict[str, Any] | None:
    """Return the section for FSDP2 if the plan shards weights."""
    level = result.plan["sharding"]
    if level not in IN_FSDP:
        return None
    found.express("sharding")
    own = result.facts is not None and any(root.transformers for root in result.facts.roots)
    if not own:
        found.notes.append("FSDP gathers the model as one unit. To gather it block by block, set")
        found.notes.append("  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP and the block's class")
        found.notes.append("  in fsdp_transformer_layer_cls_to_wrap.")
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": level != "zero2",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if own else "NO_WRAP",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_offload_params": level == "full_offload",
    }


def _halves(result: Result) -> dict[str, Any]:
    """Return the section that shards weights within each half of the ranks."""
    name = "parallelism_config_dp"
    return {f"{name}_replicate_size": 2, f"{name}_shard_size": result.devices // 2}


def _deepspeed_of(result: Result, found: Carried) -> dict[str, Any] | None:
    """Return the section for DeepSpeed if the plan shards the optimizer state alone."""
    if result.plan["sharding"] != "zero1":
        return None
    found.express("sharding")
    chunks = parts(result)
    if chunks is not None:
        found.express("micro_batch")
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
    split = "micro_batch" in found.strategies
    if plan["ranks"] != AS_IS:
        found.express("ranks")
        each = size if split else samples_a_device(result)
        found.in_script.append(f"each process takes {each} samples a batch from its loader")
        if not split:
            found.notes.append(
                "DataLoaderConfiguration(split_batches=True), given to the Accelerator, does so."
            )
    if plan["micro_batch"] != AS_IS and not split:
        found.by_hand |= accumulation(result)
    if result.devices > 1 and result.hardware.device == "cpu":
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
    return {"micro_batch": told}


def _about_precision(result: Result, found: Carried, fsdp: object, deepspeed: object) -> None:
    """Say how Accelerate's low precision differs from that of the plan."""
    found.notes.append(
        "Only scripts that make an Accelerator read this file: accelerate launch --config_file."
    )
    low = result.plan["precision"]
    if fsdp is not None and low == "bf16":
        found.notes.append(
            "Under FSDP Accelerate's bf16 gathers weights and reduces gradients in bf16 too."
        )
    if deepspeed is not None and low in AUTOCAST:
        found.notes.append(f"Under DeepSpeed Accelerate's {low} converts the weights too.")
    if low == "fp16":
        found.notes.append("Accelerate's own scaler scales the loss, not the model's call.")


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
