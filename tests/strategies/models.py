"""Small models with a batch each, as scripts have them: what strategies are tried on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.strategies.contract import Case


class Block(nn.Module):
    """A transformer's block, written by hand."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        after: torch.Tensor = x + self.mlp(self.norms[1](x))
        return after


class Blocks(nn.Module):
    """A small language model whose script computes the loss outside."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def loss_outside(tokens: torch.Tensor) -> Case:
    def loss(logits: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    return Case(Blocks().double(), {"tokens": tokens}, loss)


def gpt2(tokens: torch.Tensor) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    kwargs = {"input_ids": tokens, "labels": tokens}  # in float32, to which it casts its logits
    return Case(GPT2LMHeadModel(config), kwargs, lambda output: output.loss)


def padded(tokens: torch.Tensor) -> Case:
    """A language model of many words and three blocks, its batch padded to a fixed length."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=4160, n_positions=32, n_embd=16, n_layer=3, n_head=2, use_cache=False
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    lengths = tokens.shape[1] - torch.arange(len(tokens))[:, None]
    tokens = nn.functional.pad(tokens, (0, 24 - tokens.shape[1]))
    mask = (torch.arange(24) < lengths).long()
    labels = tokens.masked_fill(mask == 0, -100)
    kwargs = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    make: Any = GPT2LMHeadModel._from_config
    made: nn.Module = make(config, attn_implementation="eager")
    return Case(made, kwargs, lambda output: output.loss)


def bert(tokens: torch.Tensor) -> Case:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    mask = (torch.arange(tokens.shape[1]) < 4 + torch.arange(len(tokens))[:, None]).long()
    kwargs = {"input_ids": tokens, "attention_mask": mask, "labels": tokens[:, 0] % 2}
    model = BertForSequenceClassification(config).double()
    return Case(model, kwargs, lambda output: output.loss)


class Parts(nn.Module):
    """Holds each of ``parts`` by itself, as a U-Net holds its stages."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        for index, part in enumerate(parts):
            self.add_module(f"part{index}", part)
