"""Where repeated blocks are found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autofit.strategies.inspection.blocks import repeated_blocks
from tests.strategies.models import Parts

pytestmark = pytest.mark.quick


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.TransformerEncoderLayer(4, 1), nn.Linear(4, 4)])


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Layer(), Layer())


def convolution(inputs: int, outputs: int, *more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3), nn.BatchNorm2d(outputs), *more)


class Encoder(Parts):
    """A network of two stages and nothing else."""

    def __init__(self) -> None:
        super().__init__(convolution(1, 2), convolution(2, 4))


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (lambda: nn.Sequential(Layer(), Layer()), 2),
        (lambda: nn.ModuleList([Layer(), Layer(), Layer()]), 3),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(Layer(), Layer())), 2),
        (lambda: nn.Sequential(Layer()), 0),
        (lambda: Parts(nn.ModuleList([Layer()]), nn.Linear(4, 4)), 1),
        (lambda: nn.Sequential(Layer(), nn.Linear(4, 4)), 0),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 0),
        (lambda: nn.Sequential(nn.Linear(4, 4), Layer(), Layer(), Layer(), nn.Linear(4, 4)), 3),
        (lambda: nn.Sequential(nn.Linear(4, 4), Layer(), Layer(), nn.Linear(4, 4)), 2),
        (lambda: nn.Sequential(nn.Linear(4, 4), Stage(), Stage(), Stage()), 6),
        (lambda: nn.ModuleDict({"a": nn.ModuleList([Layer(), Layer()])}), 2),
        (lambda: nn.Sequential(convolution(1, 2), convolution(2, 4), nn.Flatten()), 2),
        (lambda: nn.Sequential(convolution(1, 2), convolution(2, 4, nn.ReLU())), 0),
        (lambda: nn.Sequential(convolution(1, 2), nn.Sequential(Layer(), Layer())), 2),
        (lambda: Parts(nn.Linear(4, 4), Stage(), nn.Linear(4, 4)), 2),
        (lambda: Parts(nn.Linear(4, 4), nn.Linear(4, 4)), 0),
        (lambda: Parts(Layer(), Layer(), nn.Linear(4, 4), Parts(convolution(1, 2))), 2),
        (lambda: Parts(Encoder(), Encoder()), 2),
        (lambda: Parts(nn.ModuleList([convolution(1, 2), convolution(2, 4)]), nn.Linear(4, 4)), 2),
        (lambda: Parts(nn.ModuleList([nn.Linear(4, 4)] * 2), nn.ModuleList([nn.Linear(4, 4)])), 0),
    ],
)
def test_where_blocks_are_found(model: Callable[[], nn.Module], count: int) -> None:
    assert len(repeated_blocks(model())) == count


def test_a_block_that_is_shared_is_one() -> None:
    layers = [Layer(), Layer()]
    assert repeated_blocks(Parts(nn.ModuleList(layers), nn.Sequential(*layers))) == layers


class ResBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(1, inputs), nn.GroupNorm(1, outputs)])
        self.first, self.second = nn.Conv2d(inputs, outputs, 3), nn.Conv2d(outputs, outputs, 3)
        self.time = nn.Linear(4, outputs)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(1, width), nn.Conv2d(width, 3 * width, 1)
        self.out = nn.Conv2d(width, width, 1)


class UNet(nn.Module):
    """Its stages are dictionaries, and the attention in the middle is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4))
        self.stem = nn.Conv2d(3, 4, 3)
        self.down = nn.ModuleList(
            [
                nn.ModuleDict({"res": ResBlock(4, 4)}),
                nn.ModuleDict({"down": nn.Conv2d(4, 4, 3)}),
                nn.ModuleDict({"res": ResBlock(4, 8), "attn": Attention(8)}),
            ]
        )
        self.middle = nn.ModuleList([ResBlock(8, 8), ResBlock(8, 8)])
        self.attention = Attention(8)
        self.up = nn.ModuleList(
            [
                nn.ModuleDict({"res": ResBlock(16, 8), "attn": Attention(8)}),
                nn.ModuleDict({"res": ResBlock(12, 4)}),
            ]
        )
        self.head = nn.Sequential(nn.GroupNorm(1, 4), nn.SiLU(), nn.Conv2d(4, 3, 3))


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(4, 4, bias=False) for _ in range(3))


class ExpertLayer(nn.Module):
    """A layer whose experts have nearly all of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(4), nn.RMSNorm(4)])
        self.qkv, self.out = nn.Linear(4, 12, bias=False), nn.Linear(4, 4, bias=False)
        self.router = nn.Linear(4, 32, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(32))


class Bottleneck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[convolution(4, 4, nn.ReLU()) for _ in range(3)])


class BlocksByName(nn.Module):
    """A stage that adds its blocks one by one, as timm's RegNet does."""

    def __init__(self, number: int) -> None:
        super().__init__()
        for index in range(number):
            self.add_module(f"b{index}", Bottleneck())


def residual() -> nn.Module:
    """Return a network whose last stage is one block."""
    stages = [nn.Sequential(*[Bottleneck() for _ in range(number)]) for number in (3, 3, 4, 1)]
    return Parts(convolution(3, 4, nn.ReLU()), *stages, nn.Linear(4, 4))


def of_hub(name: str, /, *suffix: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return how to make a small model of transformers."""

    def make() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        config = getattr(transformers, f"{name}Config")(**settings)
        model: nn.Module = getattr(transformers, name + (suffix[0] if suffix else "Model"))(config)
        return model

    return make


SMALL = {
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
TEXT = {**SMALL, "vocab_size": 16, "pad_token_id": 0}
T5 = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_heads": 2, "vocab_size": 16}
WHISPER = {
    "d_model": 8,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "vocab_size": 16,
    "pad_token_id": 0,
}
SWIN = {"embed_dim": 8, "num_heads": [1, 2, 4, 8], "depths": [2, 2, 6, 2]}
HEADED = "ForSequenceClassification"


@pytest.mark.parametrize(
    ("model", "blocks"),
    [
        (UNet, {"ResBlock": 6, "Attention": 3}),
        (lambda: Parts(UNet(), UNet()), {"ResBlock": 12, "Attention": 6}),
        (residual, {"Bottleneck": 11}),
        (lambda: Parts(BlocksByName(2), BlocksByName(4), nn.Linear(4, 4)), {"Bottleneck": 6}),
        (lambda: Parts(nn.ModuleList(ExpertLayer() for _ in range(3))), {"ExpertLayer": 3}),
        (
            lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 4),
            {"TransformerEncoderLayer": 4},
        ),
        (
            lambda: nn.Transformer(8, 2, 3, 2, 16),
            {"TransformerEncoderLayer": 3, "TransformerDecoderLayer": 2},
        ),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()), {}),
        (of_hub("Bert", HEADED, **TEXT), {"BertLayer": 3}),
        (of_hub("GPT2", "LMHeadModel", n_embd=8, n_layer=3, n_head=2), {"GPT2Block": 3}),
        (of_hub("Llama", "ForCausalLM", **TEXT), {"LlamaDecoderLayer": 3}),
        (of_hub("DebertaV2", HEADED, **TEXT), {"DebertaV2Layer": 3}),
        (of_hub("ViT", "ForImageClassification", **SMALL), {"ViTLayer": 3}),
        (of_hub("Albert", HEADED, **TEXT, embedding_size=4), {"AlbertLayerGroup": 1}),
        (of_hub("T5", "ForConditionalGeneration", num_layers=3, **T5), {"T5Block": 6}),
        (of_hub("T5", num_layers=2, **T5), {"T5Block": 4}),
        (
            of_hub("CLIP", text_config=TEXT, vision_config={**SMALL, "num_hidden_layers": 2}),
            {"CLIPEncoderLayer": 5},
        ),
        (
            of_hub("Whisper", encoder_layers=2, decoder_layers=3, **WHISPER),
            {"WhisperEncoderLayer": 2, "WhisperDecoderLayer": 3},
        ),
        (
            of_hub("Whisper", encoder_layers=1, decoder_layers=1, **WHISPER),
            {"WhisperEncoderLayer": 1, "WhisperDecoderLayer": 1},
        ),
        (of_hub("Swinv2", **SWIN), {"Swinv2Layer": 12}),
        (of_hub("Swin", **SWIN), {"SwinLayer": 12}),
        (of_hub("ResNet", depths=[1, 2, 3, 1]), {"ResNetBottleNeckLayer": 7}),
        (of_hub("ConvNext", depths=[2, 2, 4, 2]), {"ConvNextLayer": 10}),
        (
            of_hub("Mixtral", "ForCausalLM", **TEXT, num_key_value_heads=2, num_local_experts=4),
            {"MixtralDecoderLayer": 3},
        ),
    ],
)
def test_blocks_of_models(model: Callable[[], nn.Module], blocks: dict[str, int]) -> None:
    with torch.device("meta"):
        found = repeated_blocks(model())
    assert Counter(type(each).__name__ for each in found) == blocks
