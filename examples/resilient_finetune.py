"""Fine-tunes a small classifier in a loop of its own that survives running out of memory.

The step is protected: a batch that does not fit is taken in parts, and the optimizer sees the same
gradient. ``--memory-hungry 200`` makes one batch four times as long, as real data does.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

import autofit
from autofit.resilience import Retry

Batch = dict[str, torch.Tensor]


class Classifier(nn.Module):
    """Word vectors, two layers of attention, and a mean over the words."""

    def __init__(self, words: int, width: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the scores, ``(batch, classes)``, of ``words``, ``(batch, length)``."""
        return self.head(self.encoder(self.embed(words)).mean(1))  # type: ignore[no-any-return]


def batches(arguments: argparse.Namespace, device: str) -> Iterator[Batch]:
    """Yield batches whose label is the remainder of the first word."""
    draws = torch.Generator().manual_seed(arguments.seed)
    for step in range(arguments.steps):
        length = arguments.length * (4 if step + 1 == arguments.memory_hungry else 1)
        words = torch.randint(0, 64, (arguments.batch_size, length), generator=draws)
        words[:, 1:] = words[:, :1]
        yield {"words": words.to(device), "label": (words[:, 0] % 4).to(device)}


def train(arguments: argparse.Namespace, device: str) -> list[float]:
    """Return the loss of every step."""
    torch.manual_seed(arguments.seed)
    model = Classifier(64, arguments.width, 4).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @autofit.resilient.step(on_retry=tell)
    def step(batch: Batch) -> torch.Tensor:
        return functional.cross_entropy(model(batch["words"]), batch["label"])

    losses = []
    for batch in batches(arguments, device):
        optimizer.zero_grad()
        losses.append(step(batch).item())
        optimizer.step()
    return losses


def tell(retry: Retry) -> None:
    """Print what happened."""
    print(f"out of memory with {retry.tried}; goes on with {retry.next}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--length", type=int, default=32, help="words in a text")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--memory-hungry", type=int, default=0, help="step with texts 4x as long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--losses", help="file to write the loss of every step to")
    arguments = parser.parse_args()
    losses = train(arguments, arguments.device)
    if arguments.losses:
        with open(arguments.losses, "w", encoding="utf-8") as file:
            file.writelines(f"{loss}\n" for loss in losses)
    print(f"done: {len(losses)} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
