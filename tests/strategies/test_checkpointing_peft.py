"""A Hugging Face model inside another is checkpointed without its hooks on the embeddings."""

from __future__ import annotations

import pytest

from autofit.strategies.checkpointing import _switch_on
from autofit.strategies.inspection.blocks import repeated_blocks

pytestmark = pytest.mark.quick


def test_a_peft_model_keeps_no_hook_on_its_embeddings() -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=8)
    inner = transformers.GPT2LMHeadModel(config)
    model = peft.get_peft_model(inner, peft.LoraConfig(target_modules=["c_attn"]))
    undo = _switch_on(model, "all", repeated_blocks(model))
    assert not inner.get_input_embeddings()._forward_hooks
    assert "_require_grads_hooks" not in vars(inner)
    undo()
    assert not inner.get_input_embeddings()._forward_hooks
