"""Inserts LoRA adapters into a model, and into the optimizer that the script has created.

The optimizer's groups keep their settings, so schedules still work. Each adapter replaces the
weight of its layer in the weight's group. Other frozen parameters are removed with their state.
With 4 bits the float32 weights are emptied at once, because the script's optimizer refers to them
until its first step.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from autofit.exceptions import Refused
from autofit.strategies.adapters import ALPHA, RANK
from autofit.strategies.base import OptimizerHandle
from autofit.strategies.inspection.blocks import repeated_blocks

CONV1D = "Conv1D"
"""Hugging Face's linear layer with a transposed weight (GPT-2)."""

_injected: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_homes = WeakTensorKeyDictionary()
"""Each adapter parameter to a weak reference to its layer's weight."""


def inject(module: nn.Module, *, four_bit: bool) -> None:
    """Insert adapters beside the linear layers of the blocks of ``module``.

    Raises ``Refused`` if the blocks have no linear layers.
    """
    if module in _injected:
        return
    layers = linear_layers(module, four_bit=four_bit)
    if not layers:
        if repeated_blocks(module):
            raise Refused("the repeated blocks have no linear layers to add adapters to")
        return  # another root of this script has the blocks
    if four_bit and any(layer.weight.dtype is torch.float64 for layer in layers.values()):
        raise Refused("the model's weights are float64")
    if any(parameter.dtype.itemsize < 2 for parameter in module.parameters()):
        raise Refused("the script has quantized the model already")
    from peft import LoraConfig, inject_adapter_in_model

    weights = {name: weakref.ref(layer.weight) for name, layer in layers.items()}
    if four_bit:
        for name, layer in layers.items():
            module.set_submodule(name, quantised(layer))
    config = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=list(layers),
        fan_in_fan_out=all(type(layer).__name__ == CONV1D for layer in layers.values()),
    )
    devices = {p.device.index for p in module.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices=list(devices)):  # the script's random draws stay the same
        inject_adapter_in_model(config, module)
    for name, weight in weights.items():
        for parameter in module.get_submodule(name).parameters():
            if parameter.requires_grad:
                if parameter.dtype.itemsize < 4:  # in half precision small steps would be lost
                    parameter.data = parameter.data.float()
                _homes[parameter] = weight
    for parameter in module.parameters():
        if not parameter.requires_grad:
            parameter.grad = None
    _injected.add(module)


def linear_layers(module: nn.Module, *, four_bit: bool) -> dict[str, Any]:
    """Return the linear layers of the blocks of ``module`` by name."""
    inside = {id(each) for block in repeated_blocks(module) for each in block.modules()}
    return {
        name: each
        for name, each in module.named_modules()
        if id(each) in inside
        and (type(each) is nn.Linear or (type(each).__name__ == CONV1D and not four_bit))
    }


def quantised(layer: nn.Linear) -> nn.Module:
    """Return ``layer`` with its weight in 4 bits. The memory of the old weight is freed."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    weight = layer.weight
    half = weight.is_cuda and torch.cuda.is_bf16_supported()
    made: nn.Module = Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        compute_dtype=torch.bfloat16 if half else torch.float32,
        quant_type="nf4",
        device="meta",
    )
    made.weight = Params4bit(weight.data, requires_grad=False, quant_type="nf4").to(weight.device)
    made.bias = layer.bias
    made.train(layer.training)
    weight.grad = None
    weight.data = weight.data.new_empty(0)
    return made


def take_over(handle: OptimizerHandle) -> None:
    """Replace frozen parameters in the optimizer's groups by their adapters."""
    optimizer = handle.optimizer
    models = [module for module in handle.modules() if module in _injected]
    groups = optimizer.param_groups
    held = {id(parameter) for group in groups for parameter in group["params"]}
    homes = {
        parameter: weight
        for module in models
        for parameter in module.parameters()
        if (home := _homes.get(parameter)) is not None
        and (weight := home()) is not None
        and id(weight) in held
    }
    if all(id(parameter) in held for parameter in homes):
        return
    frozen = {id(p) for module in models for p in module.parameters() if not p.requires_grad}
    frozen |= {id(weight) for weight in homes.values()}
    for group in groups:
        here = {id(parameter) for parameter in group["params"]}
        for parameter in group["params"]:
            if id(parameter) in frozen:
                optimizer.state.pop(parameter, None)
        group["params"] = [
            *(parameter for parameter in group["params"] if id(parameter) not in frozen),
            *(parameter for parameter, weight in homes.items() if id(weight) in here),
        ]
