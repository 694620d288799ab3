"""Train a vision transformer on pictures that the script draws itself.

The pictures come from a Dataset through a DataLoader, the loss is computed outside the model, and
every epoch ends with an evaluation. The preset `large` is ViT-L/16 at 224 pixels, 64 pictures a
forward pass.

    python examples/image_classifier.py --preset tiny --epochs 2
"""

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from _by_hand import adamw, add_flags, autocast, prepare
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


@dataclass(frozen=True)
class Preset:
    """The sizes of a model and of the pictures it is trained on.

    `size` and `patch` are in pixels a side, `batch_size` in pictures a forward pass, `pictures`
    in training pictures an epoch.
    """

    size: int
    patch: int
    width: int
    layers: int
    heads: int
    batch_size: int
    classes: int
    pictures: int
    learning_rate: float


PRESETS = {
    "tiny": Preset(32, 4, 96, 4, 3, 64, 10, 1280, 1e-3),
    "small": Preset(224, 16, 384, 12, 6, 64, 100, 1024, 5e-4),
    "base": Preset(224, 16, 768, 12, 12, 64, 100, 1024, 3e-4),
    "large": Preset(224, 16, 1024, 24, 16, 64, 100, 1024, 2e-4),
}


class StripedPictures(Dataset[tuple[Tensor, int]]):
    """Noisy stripes: the class of a picture is the direction and the number of its stripes.

    All pictures are drawn at once and kept as bytes, as decoded photographs would be. An item is
    a picture (3, size, size), about -1 to 1, and its class.
    """

    def __init__(self, count: int, size: int, classes: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(classes, (count,), generator=draw).tolist()
        self.pictures = torch.empty(count, 3, size, size, dtype=torch.uint8)
        line = torch.linspace(-1, 1, size)
        for picture, label in zip(self.pictures, self.labels, strict=True):
            angle = math.pi * label / classes
            waves = math.pi * (3 + label % 3)
            phase = 2 * math.pi * torch.rand((), generator=draw)
            along = line[:, None] * math.cos(angle) + line * math.sin(angle)
            noise = torch.randn(3, size, size, generator=draw)
            bright = torch.sin(waves * along + phase) + 0.5 * noise
            picture.copy_((127.5 + 50 * bright).clamp(0, 255))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.pictures[index].float() / 127.5 - 1, self.labels[index]


class Block(nn.Module):
    """One pre-norm encoder layer: (batch, patches, width) to the same shape."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.perceptron_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        joined: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return joined

    def forward(self, x: Tensor) -> Tensor:
        """Let the patches look at each other, then work on each patch alone."""
        x = x + self.dropout(self._attend(self.attention_norm(x)))
        x = x + self.dropout(self.down(F.gelu(self.up(self.perceptron_norm(x)))))
        return x


class VisionTransformer(nn.Module):
    """Pictures (batch, 3, size, size) to class scores (batch, classes)."""

    def __init__(self, preset: Preset, dropout: float) -> None:
        super().__init__()
        width = preset.width
        patches = (preset.size // preset.patch) ** 2
        self.patches = nn.Conv2d(3, width, kernel_size=preset.patch, stride=preset.patch)
        self.summary = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, patches + 1, width) * 0.02)
        self.blocks = nn.ModuleList(
            Block(width, preset.heads, dropout) for _ in range(preset.layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, preset.classes)
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    def forward(self, pictures: Tensor) -> Tensor:
        """Cut into patches, run the blocks, read the scores off the summary token."""
        patches = self.patches(pictures).flatten(2).transpose(1, 2)
        summary = self.summary.expand(len(patches), -1, -1)
        hidden = torch.cat([summary, patches], dim=1) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        scores: Tensor = self.head(self.norm(hidden[:, 0]))
        return scores


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Warm up over the first tenth of the steps, then follow a cosine towards zero."""
    warmup = max(1, steps // 10)
    rising = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=warmup)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(1, steps - warmup))
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [rising, falling], milestones=[warmup])


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader[tuple[Tensor, int]], device: str) -> float:
    """Return the share of the pictures whose class is guessed right, 0 to 1."""
    model.eval()
    right = 0
    total = 0
    for pictures, labels in loader:
        guesses = model(pictures.to(device)).argmax(dim=1)
        right += int((guesses == labels.to(device)).sum())
        total += len(labels)
    model.train()
    return right / total


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train a vision transformer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default_device, help="where to train")
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="size of the model")
    parser.add_argument("--seed", type=int, default=0, help="of pictures, weights and order")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, help="stop after that many optimizer steps")
    parser.add_argument("--batch-size", type=int, help="pictures a forward pass, else the preset's")
    parser.add_argument("--accumulation", type=int, default=1, help="forward passes a step")
    parser.add_argument("--pictures", type=int, help="training pictures, else the preset's")
    parser.add_argument("--workers", type=int, default=0, help="processes that draw pictures")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--no-clip", action="store_true", help="leave the gradient's norm alone")
    parser.add_argument("--log-every", type=int, default=5, help="steps between lines")
    parser.add_argument("--losses", type=Path, help="write the loss of every step to this file")
    add_flags(parser)
    return parser.parse_args()


def loaders(
    arguments: argparse.Namespace, preset: Preset
) -> tuple[DataLoader[tuple[Tensor, int]], DataLoader[tuple[Tensor, int]]]:
    """Return the loader to train from, shuffled, and the one to evaluate on, a quarter as long."""
    count = arguments.pictures or preset.pictures
    batch_size = arguments.batch_size or preset.batch_size
    training = StripedPictures(count, preset.size, preset.classes, arguments.seed)
    held_out = StripedPictures(count // 4, preset.size, preset.classes, arguments.seed + 1)
    pinned = torch.device(arguments.device).type == "cuda"
    return (
        DataLoader(
            training,
            batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=arguments.workers,
            pin_memory=pinned,
            generator=torch.Generator().manual_seed(arguments.seed),
        ),
        DataLoader(held_out, batch_size, num_workers=arguments.workers, pin_memory=pinned),
    )


def train(arguments: argparse.Namespace) -> None:
    """Train and evaluate in turn, and end with the samples per second of the training."""
    torch.manual_seed(arguments.seed)
    preset = PRESETS[arguments.preset]
    device = arguments.device
    training, held_out = loaders(arguments, preset)
    if len(training) == 0:
        raise SystemExit(
            "the batch is larger than the data: raise --pictures or lower --batch-size"
        )
    model = VisionTransformer(preset, arguments.dropout).to(device)
    prepare(model, model.blocks, arguments)
    steps = arguments.steps or arguments.epochs * len(training) // arguments.accumulation
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = adamw(model.parameters(), arguments, lr=preset.learning_rate, weight_decay=0.05)
    scheduler = schedule(optimizer, steps)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters / 1e6:.1f} M parameters, {steps} steps, on {device}")

    losses = arguments.losses.open("w") if arguments.losses else None
    precision = autocast(arguments)
    total = torch.zeros((), device=device)
    seconds = 0.0
    samples = passes = step = epoch = 0
    while step < steps:
        started = time.perf_counter()
        for pictures, labels in training:
            pictures, labels = pictures.to(device, non_blocking=True), labels.to(device)
            size = arguments.micro_batch or len(pictures)
            for part, targets in zip(pictures.split(size), labels.split(size), strict=True):
                with precision:
                    loss = criterion(model(part), targets)
                share = len(part) / len(pictures) / arguments.accumulation
                (loss * share).backward()
                total += loss.detach() * share
            samples += len(pictures)
            passes += 1
            if passes % arguments.accumulation:
                continue
            if not arguments.no_clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if losses is not None:
                print(repr(total.item()), file=losses, flush=True)
            if step % arguments.log_every == 0 or step == steps - 1:
                print(f"epoch {epoch} step {step} loss {total.item()!r}", flush=True)
            total.zero_()
            step += 1
            if step == steps:
                break
        seconds += time.perf_counter() - started
        accuracy = evaluate(model, held_out, device)
        print(f"epoch {epoch} accuracy {accuracy:.4f}", flush=True)
        epoch += 1
    if losses is not None:
        losses.close()
    print(f"done: {samples / seconds:.2f} samples/s, {seconds / steps:.3f} s a step")


if __name__ == "__main__":
    train(parse_arguments())
