"""Head and attention of a language model on a card: bytes, time, and torch's own kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autofit.plan import Plan
from autofit.strategies import get
from autofit.strategies.attention.kernels import _Seen
from autofit.worker import meter
from autofit.worker.harness.patching.observers import Calls, Seams
from autofit.worker.harness.session.root import HarnessRoot
from tests.roots import Bystander

pytestmark = pytest.mark.gpu

WORDS, WIDTH, TOKENS = 50304, 1024, 2048


@pytest.fixture
def root() -> Iterator[Callable[..., HarnessRoot]]:
    """Return a module's root under a plan; it is left as it was."""
    calls, roots = Calls(), []

    def make(module: nn.Module, **levels: str) -> HarnessRoot:
        roots.append(HarnessRoot(module, Seams(Bystander()), calls, lambda *args: False))
        roots[-1].apply(Plan.of(levels))
        return roots[-1]

    yield make
    for each in roots:
        each.take_back()
    calls.clear()


class Net(nn.Module):
    """An embedding, one hidden layer, and a head whose logits are nearly all of a step's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.hidden = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU())
        self.head = nn.Linear(2 * WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        logits = self.head(self.hidden(self.embedding(tokens)))
        targets = tokens.roll(-1, 1).masked_fill(tokens % 7 == 0, -100)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        return loss, logits


def step(module: nn.Module, call: Callable[..., Any], *args: Any) -> tuple[torch.Tensor, int]:
    """Return the gradients of a step, and the bytes of its worst moment."""
    module.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output = call(*args)
    (output[0] if isinstance(output, tuple) else output.loss).backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del output
    gradients = [p.grad.flatten().float() for p in module.parameters() if p.grad is not None]
    return torch.cat(gradients), peak


def seconds(module: nn.Module, call: Callable[..., Any], *args: Any) -> float:
    """Return the time of a step, the shortest of several."""
    found = []
    for _ in range(5):
        module.zero_grad()
        torch.cuda.synchronize()
        started = time.perf_counter()
        call(*args)[0].backward()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return min(found)


@pytest.mark.parametrize("precision", ["as_is", "bf16"])
def test_logits_in_chunks(precision: str, root: Callable[..., HarnessRoot]) -> None:
    torch.manual_seed(0)
    module = Net().cuda()
    tokens = torch.randint(WORDS, (8, TOKENS), device="cuda")
    figures = {}
    for level in ("as_is", "chunked"):
        held = root(module, precision=precision, loss=level)

        def call(*args: Any, held: HarnessRoot = held) -> Any:
            return held.running(*args)

        step(module, call, tokens)
        gradients, peak = step(module, call, tokens)
        figures[level] = gradients, peak, seconds(module, call, tokens)
        held.take_back()
    (expected, most, slow), (found, least, fast) = figures["as_is"], figures["chunked"]
    print(f"{precision}: {most / 2**30:.2f} GiB {slow:.4f} s -> {least / 2**30:.2f} {fast:.4f}")
    allowed = 0.02 if precision == "bf16" else 1e-3
    assert float((found - expected).norm() / expected.norm()) < allowed
    assert least < 0.4 * most
    assert fast < 1.25 * slow


def llama(attention: str) -> Any:
    """Return a small model of heads of 64, in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        use_cache=False,
    )
    make: Any = LlamaForCausalLM._from_config
    return make(config, attn_implementation=attention).cuda().bfloat16().train()


def test_attention_that_is_written_out_is_switched(root: Callable[..., HarnessRoot]) -> None:
    module = llama("eager")
    tokens = torch.randint(1024, (4, TOKENS), device="cuda")
    figures = []
    for level in ("as_is", "sdpa"):
        held = root(module, attention=level)

        def call(*args: Any, held: HarnessRoot = held) -> Any:
            return held.running(input_ids=args[0], labels=args[0])

        step(module, call, tokens)
        figures.append(step(module, call, tokens))
        held.take_back()
    (expected, most), (found, least) = figures
    assert float((found - expected).norm() / expected.norm()) < 0.05
    assert least < 0.5 * most


def test_the_other_kernel_runs_and_torchs_own_choice_is_known(
    root: Callable[..., HarnessRoot],
) -> None:
    """What ``unavailable`` says of this card is what torch does by itself."""
    hardware = meter.hardware("cuda")
    if reason := get("attention").unavailable("flash", hardware):
        pytest.skip(reason)
    own, other = "cudnn", "flash"
    module = llama("sdpa")
    tokens = torch.randint(1024, (4, TOKENS), device="cuda")
    ran = {}
    for level in ("as_is", other):
        held = root(module, attention=level)
        with _Seen() as seen:
            output = held.running(input_ids=tokens, labels=tokens)
        output.loss.backward()
        ran[level] = set(seen.kernels)
        held.take_back()
    print({level: sorted(kernels) for level, kernels in ran.items()}, torch.__version__)
    assert all(other in kernel for kernel in ran[other])
    assert all(own in kernel for kernel in ran["as_is"])
