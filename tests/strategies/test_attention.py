"""Attention by torch's kernels: the model's own gradients, fewer bytes, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.backends import cuda
from torch.nn.attention import SDPBackend

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.strategies import Facts, RootFacts, get
from autofit.strategies.attention.kernels import PREFIX, FirstForward
from autofit.worker import meter
from autofit.worker.harness.session import script_facts as learn
from autofit.worker.harness.verification.plan_check import prove
from autofit.worker.meter import build
from tests.roots import Rooted

pytestmark = pytest.mark.quick


def model(family: str, attention: str = "eager", **own: Any) -> Any:
    """Return a tiny model of a family in training mode."""
    import transformers

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = getattr(transformers, f"{family}Config")(**sizes | own)
    suffix = "SequenceClassification" if family == "Bert" else "CausalLM"
    made = getattr(transformers, f"{family}For{suffix}")._from_config(
        config, attn_implementation=attention
    )
    return made.train()


def batch(family: str) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, 32, (5, 10))
    mask = (torch.arange(10) < 5 + torch.arange(5)[:, None]).long()
    labels = tokens[:, 0] % 2 if family == "Bert" else tokens.where(mask.bool(), -100)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def gradients(module: nn.Module, call: Callable[..., Any], kwargs: Any) -> list[torch.Tensor]:
    module.zero_grad()
    call(**kwargs).loss.backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("family", ["Llama", "Bert"])
@pytest.mark.parametrize(
    "beside",
    [{}, {"micro_batch": "2"}, {"checkpointing": "all"}, {"precision": "bf16"}],
    ids=["alone", "split", "checkpointing", "bf16"],
)
def test_a_model_that_writes_it_out_is_switched(
    family: str, beside: dict[str, str], rooted: Rooted
) -> None:
    own: Any = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    module, kwargs = model(family, **(own if family == "Bert" else {})), batch(family)
    without = rooted(module, **beside)
    expected = gradients(module, lambda **given: without.running(**given), kwargs)
    without.take_back()
    held = rooted(module, attention="sdpa", **beside)
    assert module.config._attn_implementation == "sdpa"
    found = gradients(module, lambda **given: held.running(**given), kwargs)
    allowed = 0.05 if "precision" in beside else 1e-4
    square = sum(float((a - b).square().sum()) for a, b in zip(found, expected, strict=True))
    norm = sum(float(b.square().sum()) for b in expected)
    assert (square / norm) ** 0.5 < allowed
    held.take_back()
    assert module.config._attn_implementation == "eager"


def test_it_is_proven_though_it_drops_otherwise(rooted: Rooted) -> None:
    module, kwargs = model("Bert", attention_probs_dropout_prob=0.5), batch("Bert")
    held = rooted(module)
    held.facts = learn.describe(module, (), kwargs)
    assert held.facts is not None
    assert held.facts.attention == "eager"
    assert held.facts.dropout
    prove(held, Plan.of({"attention": "sdpa"}), (), kwargs, Facts(roots=(held.facts,)))
    assert module.config._attn_implementation == "sdpa"


def test_what_torchs_kernels_would_pass_over_is_refused(rooted: Rooted) -> None:
    with pytest.raises(Refused, match="attn_logit_softcapping"):
        rooted(model("Gemma2", head_dim=8, attn_logit_softcapping=50.0), attention="sdpa")
    watched = model("Llama")
    watched.config.output_attentions = True
    with pytest.raises(Refused, match="returns its attention weights"):
        rooted(watched, attention="sdpa")


def test_the_kernel_is_preferred_and_looked_for(rooted: Rooted) -> None:
    order = torch._C._get_sdp_priority_order()
    held = rooted(nn.Linear(2, 2), attention="flash")
    assert torch._C._get_sdp_priority_order()[0] == SDPBackend.FLASH_ATTENTION.value
    held.take_back()
    assert torch._C._get_sdp_priority_order() == order
    module, kwargs = model("Llama", "sdpa"), batch("Llama")
    expected = gradients(module, module, kwargs)
    held = rooted(module, attention="flash")
    found = gradients(module, lambda **given: held.running(**given), kwargs)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-7)
    held.take_back()
    assert torch._C._get_sdp_priority_order() == order
    with pytest.raises(Refused, match="none of torch's attention kernels"):
        rooted(nn.Linear(2, 2), attention="flash").running(torch.ones(1, 2))
    with pytest.raises(Refused, match="flash does not support this model's attention: it runs eff"):
        FirstForward(module)._judge({f"{PREFIX}efficient_attention": torch.bfloat16})


def test_a_kernel_that_the_script_has_switched_off_stays_off(rooted: Rooted) -> None:
    cuda.enable_flash_sdp(False)
    try:
        with pytest.raises(Refused, match="disabled this attention kernel"):
            rooted(model("Llama", "sdpa"), attention="flash")
    finally:
        cuda.enable_flash_sdp(True)


def test_where_it_applies() -> None:
    attention = get("attention")

    def facts(kind: str | None) -> Facts:
        root = RootFacts(
            name="M", parameters=1, parameter_bytes=4, trainable=1, dtype="float32", attention=kind
        )
        return Facts(roots=(root,))

    assert attention.inapplicable("sdpa", facts("eager")) is None
    assert "eager" in (attention.inapplicable("sdpa", facts("sdpa")) or "")
    assert attention.inapplicable("flash", facts("sdpa")) is None
    assert "is known to call" in (attention.inapplicable("flash", facts(None)) or "")
    for level in ("sdpa", "flash"):
        reason = attention.inapplicable(level, facts("flash_attention_2")) or ""
        assert "flash_attention_2" in reason


@pytest.mark.full
def test_fewer_bytes() -> None:
    """Of a step's worst moment, of short heads over long sequences."""
    if build.shim() is None:
        pytest.skip("the memory of a CPU is counted to the byte only with a C compiler")
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE],
        env={**os.environ, **meter.environment("cpu", None)},
        check=True,
        capture_output=True,
        text=True,
    )
    peaks = json.loads(ran.stdout.splitlines()[-1])
    assert peaks["sdpa"] < 0.4 * peaks["as_is"], peaks


MEASURE = """
import json
from autofit.worker import meter
gauge = meter.for_device("cpu")
meter.forget()
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from autofit.plan import Plan
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.harness.patching.observers import Calls, Seams

class Handler:
    def __getattr__(self, name):
        return lambda *args: args[-1]() if name == "backward" else None

gauge.arm()
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                     num_attention_heads=4, max_position_embeddings=512)
model = LlamaForCausalLM._from_config(config, attn_implementation="eager")
x = torch.randint(32, (4, 512))
peaks = {}
for level in ("as_is", "sdpa"):
    root = HarnessRoot(model, Seams(Handler()), Calls(), lambda *args: False)
    root.apply(Plan.of({"attention": level}))
    for _ in range(2):
        model.zero_grad()
        before = gauge.current()
        gauge.reset()
        root.running(input_ids=x, labels=x, use_cache=False).loss.backward()
        peaks[level] = gauge.peak().allocated - before
    root.take_back()
print(json.dumps(peaks))
"""
