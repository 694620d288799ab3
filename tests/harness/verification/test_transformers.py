"""Tiny models of Hugging Face's transformers, split: labels inside, padding, caches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from autofit.facts import Facts
from autofit.plan import Plan
from autofit.worker.harness.batch.layout import Batch
from autofit.worker.harness.patching.observers import Calls, Seams
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.harness.torch_state.modules import without_cache
from autofit.worker.harness.verification.plan_check import prove
from autofit.worker.harness.verification.split_check import find_layout

Arguments = dict[str, Any]
WORDS, SAMPLES, LENGTH = 31, 8, 9
TOLERANCE = 1e-5
"""Relative: the models compute their loss in float32."""
SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def tokens(ragged: bool, labels: bool = True) -> Arguments:
    """Words with a mask over the padding, and labels that skip it."""
    ids = torch.randint(1, WORDS, (SAMPLES, LENGTH))
    lengths = torch.randint(2, LENGTH + 1, (SAMPLES,)) if ragged else torch.full((SAMPLES,), LENGTH)
    mask = torch.arange(LENGTH) < lengths[:, None]
    found = {"input_ids": ids * mask, "attention_mask": mask.long()}
    return found | {"labels": torch.where(mask, ids, -100)} if labels else found


def counted(ragged: bool) -> Arguments:
    """The same with the number of labels given, as the Trainer does when it accumulates."""
    found = tokens(ragged)
    return found | {"num_items_in_batch": 2 * (found["labels"][:, 1:] != -100).sum()}


def pictures(ragged: bool) -> Arguments:
    return {"pixel_values": torch.randn(SAMPLES, 3, 8, 8), "labels": torch.randint(4, (SAMPLES,))}


def classes(ragged: bool) -> Arguments:
    return tokens(ragged, labels=False) | {"labels": torch.randint(3, (SAMPLES,))}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=16,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(vocab_size=WORDS, intermediate_size=32, **SMALL)
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=WORDS, intermediate_size=32, **SMALL,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    config.num_labels = 3
    return transformers.BertForSequenceClassification(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
        dropout_rate=0.0,
    )  # fmt: skip
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        image_size=8, patch_size=4, intermediate_size=32, **SMALL,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    config.num_labels = 4
    return transformers.ViTForImageClassification(config)


class Handler:
    """Accepts what the seams report; the tests drive the roots by hand."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: args[-1]() if name == "backward" else None


@pytest.fixture
def split() -> Iterator[Callable[[nn.Module], Callable[..., Any]]]:
    """Return a way to split a module's batch into chunks of three samples."""
    seams, calls = Seams(Handler()), Calls()

    def make(module: nn.Module) -> Callable[..., Any]:
        def shortage(error: BaseException, phase: str, size: int) -> bool:
            raise error

        root = HarnessRoot(module, seams, calls, shortage)
        root.apply(Plan.of({"micro_batch": "3"}))
        return lambda **kwargs: root.running(**kwargs)

    yield make
    calls.clear()


QUICK = [(gpt2, tokens), (t5, tokens)]
REST = [(gpt2, counted), (llama, tokens), (llama, counted), (bert, classes), (vit, pictures)]


@pytest.mark.parametrize(
    ("model", "arguments"),
    [pytest.param(*each, marks=pytest.mark.quick) for each in QUICK]
    + [pytest.param(*each, marks=pytest.mark.full) for each in REST],
)
def test_it_is_the_same_training(
    split: Callable[..., Any],
    model: Callable[[], nn.Module],
    arguments: Callable[[bool], Arguments],
) -> None:
    torch.manual_seed(3)
    plain = model().train()
    ours = copy.deepcopy(plain)
    call = split(ours)
    for ragged in (False, True, True):
        given = arguments(ragged)
        for module, forward in ((plain, plain), (ours, call)):
            module.zero_grad()
            output = forward(**given)
            output.loss.backward()
            if forward is plain:
                expected = output
        assert output.get("past_key_values") is None
        torch.testing.assert_close(output.loss, expected.loss, rtol=TOLERANCE, atol=0)
        torch.testing.assert_close(output.logits, expected.logits, rtol=1e-4, atol=1e-6)
        for (name, found), wanted in zip(ours.named_parameters(), plain.parameters(), strict=True):
            assert found.grad is not None, name
            assert wanted.grad is not None
            scale = max(float(wanted.grad.norm()), 1e-3)
            assert float((found.grad - wanted.grad).norm()) <= TOLERANCE * scale, name


@pytest.mark.quick
@pytest.mark.parametrize("model", [bert, gpt2, llama])
@pytest.mark.parametrize("level", ["1", "2", "all"])
def test_their_own_checkpointing_is_proven(model: Callable[[], nn.Module], level: str) -> None:
    """Its switch is no sign of a block that counts its calls."""
    own = model()
    root = HarnessRoot(own, Seams(None), Calls(), lambda *_: False)  # type: ignore[arg-type]
    arguments = classes(True) if model is bert else tokens(True)
    prove(root, Plan.of({"checkpointing": level}), (), arguments, Facts())
    assert any(getattr(each, "gradient_checkpointing", False) for each in own.modules())


@pytest.mark.quick
@pytest.mark.parametrize("level", ["1", "2", "all"])
def test_their_switch_makes_no_new_kind_of_call(level: str) -> None:
    """What a plan sets on the modules is no reason to prove anew how the batch is split."""
    own = llama()
    root = HarnessRoot(own, Seams(None), Calls(), lambda *_: False)  # type: ignore[arg-type]
    batch = Batch.of((), without_cache(own, tokens(False)))
    root.splits.layout(batch)
    assert root.proof.proofs == 1
    root.apply(Plan.of({"checkpointing": level}))
    root.splits.layout(batch)
    proofs = root.proof.proofs
    assert proofs == 1
    vars(own)["scale"] = 2.0  # the script's own change, which may matter
    root.splits.layout(batch)
    assert root.proof.proofs == proofs + 1
    root.take_back()
    root.splits.layout(batch)
    assert root.proof.proofs == proofs + 1


@pytest.mark.quick
def test_many_layers_tell_samples_apart() -> None:
    """Anything added in each of them would leave next to nothing of what tells samples apart."""
    config = transformers.BertConfig(
        vocab_size=500, intermediate_size=256, hidden_size=64, num_hidden_layers=24,
        num_attention_heads=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config)
    batch = Batch.of((), {"input_ids": torch.randint(500, (4, 64)), "labels": torch.arange(4) % 2})
    assert find_layout(model, model, batch).joins
    assert not model.get_parameter("bert.pooler.dense.bias").any(), "as it was"
