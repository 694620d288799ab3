"""Every registered strategy keeps the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autofit.strategies import NAMES, REGISTRY, Strategy, compile
from autofit.worker.harness.roots import HarnessRoot
from autofit.worker.harness.seams import Calls, Seams
from tests.strategies.contract import PAIRS, SETTINGS, Case, Setting, StrategyContract

pytestmark = pytest.mark.quick


def _called(setting: Setting) -> str:
    return f"{setting[0].name}-{setting[1]}"


@pytest.fixture(params=REGISTRY, ids=NAMES)
def strategy(request: pytest.FixtureRequest) -> Any:
    """Each strategy."""
    return request.param


def _param(*settings: Setting) -> Any:
    """Return the parameter of one level, or two; what compiles takes seconds each time."""
    value = settings[0] if len(settings) == 1 else settings
    slow = any(strategy.sized for strategy, _ in settings)
    name = "+".join(map(_called, settings))
    return pytest.param(value, id=name, marks=[pytest.mark.full] if slow else [])


@pytest.fixture(params=[_param(each) for each in SETTINGS])
def setting(request: pytest.FixtureRequest) -> Any:
    """Each level of each strategy that changes something."""
    return request.param


@pytest.fixture(params=[_param(*pair) for pair in PAIRS])
def pair(request: pytest.FixtureRequest) -> Any:
    """Each two levels of different strategies."""
    return request.param


@pytest.fixture
def calls() -> Iterator[Calls]:
    """What keeps the wrappers of single modules."""
    calls = Calls()
    yield calls
    calls.clear()


@pytest.fixture
def root(calls: Calls) -> Iterator[Callable[[nn.Module], HarnessRoot]]:
    """Return the harness's root of a module; it is left as it was."""
    roots: list[HarnessRoot] = []

    def make(module: nn.Module) -> HarnessRoot:
        roots.append(HarnessRoot(module, Seams(_Handler()), calls, lambda *args: False))
        return roots[-1]

    yield make
    for each in roots:
        each.take_back()


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace and differentiate what is compiled, but make no code of it: that takes seconds.

    ``test_compile.py`` makes the code.
    """
    monkeypatch.setattr(compile, "SETTINGS", {"backend": "aot_eager"})


class _Handler:
    """Accepts what the seams report; the tests drive the roots by hand."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: args[-1]() if name == "backward" else None


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


@pytest.fixture(params=[loss_outside, gpt2, bert], ids=lambda make: make.__name__)
def case(request: pytest.FixtureRequest) -> Case:
    """Each model with its batch, in training mode."""
    torch.manual_seed(3)
    made: Case = request.param(torch.randint(32, (5, 10)))
    made.module.train()
    return made


def test_names_are_unique() -> None:
    assert len(set(NAMES)) == len(REGISTRY)


class TestContract(StrategyContract):
    """The contract, with this module's models."""

    def test_the_registry_finds_it(self, strategy: Strategy) -> None:
        from autofit import strategies

        assert strategies.get(strategy.name) is strategy
