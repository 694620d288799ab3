"""Train a small character language model on a text that the script writes itself.

The loop is written by hand: there is no DataLoader (`get_batch` cuts windows out of one long text),
and the model returns its own loss. At the default size the tensors of a step need up to 340 MiB,
of which the weights, their gradients and the optimizer state are only 41 MiB.

    python examples/char_lm.py --steps 60
"""

import argparse
import math
import random
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SUBJECTS = ("the ferryman", "a quiet clerk", "my neighbour", "the old captain", "her sister")
VERBS = ("carries", "counts", "forgets", "repairs", "sells", "watches")
OBJECTS = ("the lamps", "two baskets", "a broken clock", "seven letters", "the long rope")
PLACES = ("by the harbour", "under the bridge", "in the market", "at the end of the lane")


class Attention(nn.Module):
    """Causal self-attention: (batch, time, width) to (batch, time, width)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Let every position look at itself and at the positions before it."""
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        joined: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return joined


class Block(nn.Module):
    """One pre-norm decoder layer: attention, then a two-layer perceptron, both residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        x = x + self.dropout(self.perceptron(self.perceptron_norm(x)))
        return x


class CharModel(nn.Module):
    """A decoder over characters; it returns its own loss when it is given targets."""

    def __init__(
        self, vocabulary: int, context: int, width: int, heads: int, layers: int, dropout: float
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return the mean cross-entropy (a scalar), or the logits when there are no targets.

        `x` and `y` hold character numbers, (batch, time); logits are (batch, time, vocabulary).
        """
        positions = torch.arange(x.shape[1], device=x.device)
        hidden = self.dropout(self.characters(x) + self.positions(positions))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        if y is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def write_text(sentences: int, seed: int) -> str:
    """Return that many short sentences, the same ones for the same seed."""
    draw = random.Random(seed)
    parts = (SUBJECTS, VERBS, OBJECTS, PLACES)
    return "".join(
        " ".join(draw.choice(words) for words in parts) + ".\n" for _ in range(sentences)
    )


def get_batch(
    data: Tensor, batch_size: int, context: int, generator: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cut random windows: inputs and the same shifted by one, both (batch_size, context)."""
    starts = torch.randint(len(data) - context, (batch_size,), generator=generator)
    windows = torch.stack([data[start : start + context + 1] for start in starts.tolist()])
    windows = windows.to(device)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Warm up over the first tenth of the steps, then follow a cosine down to a tenth."""
    warmup = max(1, steps // 10)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, steps - warmup)
        return 0.1 + 0.45 * (1.0 + math.cos(math.pi * progress))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train a small character language model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default_device, help="where to train")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--seed", type=int, default=0, help="of text, weights and batches")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=32, help="windows in a forward pass")
    parser.add_argument("--accumulation", type=int, default=1, help="forward passes a step")
    parser.add_argument("--context", type=int, default=128, help="characters in a window")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--log-every", type=int, default=10, help="steps between lines")
    parser.add_argument("--losses", type=Path, help="write the loss of every step to this file")
    return parser.parse_args()


def train(arguments: argparse.Namespace) -> None:
    """Train, print the loss now and then, and end with the samples per second."""
    torch.manual_seed(arguments.seed)
    device = torch.device(arguments.device)
    text = write_text(sentences=5000, seed=arguments.seed)
    alphabet = sorted(set(text))
    number = {character: index for index, character in enumerate(alphabet)}
    data = torch.tensor([number[character] for character in text])
    batches = torch.Generator().manual_seed(arguments.seed)

    model = CharModel(
        len(alphabet),
        arguments.context,
        arguments.width,
        arguments.heads,
        arguments.layers,
        arguments.dropout,
    ).to(device, getattr(torch, arguments.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    scheduler = schedule(optimizer, arguments.steps)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters, {len(alphabet)} characters, on {device}")

    with ExitStack() as stack:
        losses = stack.enter_context(arguments.losses.open("w")) if arguments.losses else None
        started = time.perf_counter()
        for step in range(arguments.steps):
            total = 0.0
            for _ in range(arguments.accumulation):
                x, y = get_batch(data, arguments.batch_size, arguments.context, batches, device)
                loss = model(x, y) / arguments.accumulation
                loss.backward()
                total += loss.item()
            nn.utils.clip_grad_norm_(model.parameters(), arguments.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            if losses is not None:
                print(repr(total), file=losses, flush=True)
            if step % arguments.log_every == 0 or step == arguments.steps - 1:
                print(f"step {step} loss {total!r}", flush=True)
        seconds = time.perf_counter() - started

    samples = arguments.steps * arguments.accumulation * arguments.batch_size
    print(f"done: {samples / seconds:.2f} samples/s, {seconds / arguments.steps:.3f} s a step")


if __name__ == "__main__":
    train(parse_arguments())
