"""Plain training loops over tiny Hugging Face models from configs: ``test_hf_loops.py`` runs them.

As a script it trains each model, and prints a line with its name and losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

STEPS, SAMPLES, WORDS, LENGTH = 3, 6, 31, 9
SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
"""Words that the vocabulary has, or a configuration warns."""


def words() -> torch.Tensor:
    return torch.randint(3, WORDS, (SAMPLES, LENGTH))


def labelled() -> dict[str, torch.Tensor]:
    found = words()
    return {"input_ids": found, "labels": found}


def configured(kind: Any, **settings: Any) -> Any:
    """Return a configuration; releases differ in what they declare."""
    return kind(**settings)


def gpt2() -> nn.Module:
    config = configured(
        transformers.GPT2Config,
        vocab_size=WORDS,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **ENDS,
    )
    return transformers.GPT2LMHeadModel(config)


def t5() -> nn.Module:
    config = configured(
        transformers.T5Config,
        vocab_size=WORDS,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def llama() -> nn.Module:
    config = configured(
        transformers.LlamaConfig, vocab_size=WORDS, intermediate_size=32, **SMALL, **ENDS
    )
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    config = configured(
        transformers.BertConfig,
        vocab_size=WORDS,
        intermediate_size=32,
        num_labels=3,
        **SMALL,
        **UNDROPPED,
    )
    return transformers.BertForSequenceClassification(config)


def vit() -> nn.Module:
    config = configured(
        transformers.ViTConfig,
        image_size=8,
        patch_size=4,
        intermediate_size=32,
        num_labels=4,
        **SMALL,
        **UNDROPPED,
    )
    return transformers.ViTForImageClassification(config)


def whisper() -> nn.Module:
    config = configured(
        transformers.WhisperConfig,
        vocab_size=WORDS,
        d_model=16,
        num_mel_bins=8,
        max_source_positions=8,
        max_target_positions=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        dropout=0.0,
        decoder_start_token_id=1,
        begin_suppress_tokens=None,
        **ENDS,
    )
    return transformers.WhisperForConditionalGeneration(config)


def sorted_into(classes: int, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    return inputs | {"labels": torch.randint(classes, (SAMPLES,))}


LOOPS: dict[Callable[[], nn.Module], Callable[[], dict[str, torch.Tensor]]] = {
    gpt2: labelled,
    t5: labelled,
    llama: labelled,
    bert: lambda: sorted_into(3, input_ids=words()),
    vit: lambda: sorted_into(4, pixel_values=torch.randn(SAMPLES, 3, 8, 8)),
    whisper: lambda: {"input_features": torch.randn(SAMPLES, 8, 16), "labels": words()},
}
"""Models to what makes a batch of theirs."""


def losses(make: Callable[[], nn.Module]) -> list[float]:
    """Train as anybody would; return the loss of each step.

    The batches come first: some releases draw in each call, for layers that none is left out of.
    """
    torch.manual_seed(0)
    batches = [LOOPS[make]() for _ in range(STEPS)]
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


if __name__ == "__main__":
    for each in LOOPS:
        print(each.__name__, *losses(each), flush=True)
