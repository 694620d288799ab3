"""Train a Llama-style language model with a loop written by hand around the model of transformers.

The loss is computed inside the model, from labels. The text is made up: each token is mostly the
one before it plus a number of the document's own, so that there is something to learn. Nothing is
downloaded; weights are random. The preset `1.1b` has 16 documents of 2048 tokens a step.

    python examples/decoder_lm.py --preset tiny --steps 40
    torchrun --nproc-per-node 2 examples/decoder_lm.py --parallel fsdp2
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from _by_hand import adamw, add_flags, autocast, prepare
from _ranks import Ranks, add_flag, built_on, join, leave, mean, reducing, spread
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True)
class Preset:
    """The sizes of a model and of its documents; `tokens` a document, `batch_size` documents."""

    width: int
    inner: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int
    tokens: int
    batch_size: int
    learning_rate: float


PRESETS = {
    "tiny": Preset(64, 176, 4, 4, 2, 256, 64, 16, 3e-3),
    "1.1b": Preset(2048, 5632, 22, 32, 4, 32000, 2048, 16, 2e-4),
    "7b": Preset(4096, 11008, 32, 32, 32, 32000, 2048, 16, 1e-4),
    "8b": Preset(4096, 14336, 32, 32, 8, 128256, 2048, 16, 1e-4),
    "13b": Preset(5120, 13824, 40, 40, 40, 32000, 2048, 16, 1e-4),
    "30b": Preset(6656, 17920, 60, 52, 52, 32000, 2048, 16, 1e-4),
}


class Documents(Dataset[Tensor]):
    """Made-up documents of token numbers, each drawn when it is asked for: (tokens,)."""

    def __init__(self, count: int, preset: Preset, seed: int) -> None:
        self.count = count
        self.preset = preset
        self.seed = seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        size = self.preset.vocabulary
        step = int(torch.randint(1, 8, (), generator=draw))
        places = torch.arange(self.preset.tokens)
        new = torch.rand(self.preset.tokens, generator=draw) < 0.3
        started = torch.where(new, places, 0).cummax(0).values
        words = torch.randint(size, (self.preset.tokens,), generator=draw)
        return (words[started] + step * (places - started)) % size


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train a Llama-style language model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default_device, help="where to train")
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="size of the model")
    parser.add_argument("--seed", type=int, default=0, help="of text, weights and order")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, help="documents a step, else the preset's")
    parser.add_argument("--documents", type=int, default=512, help="to train on")
    parser.add_argument("--no-clip", action="store_true", help="leave the gradient's norm alone")
    parser.add_argument("--log-every", type=int, default=5, help="steps between lines")
    parser.add_argument("--losses", type=Path, help="write the loss of every step to this file")
    add_flag(parser)
    add_flags(parser)
    return parser.parse_args()


def build_model(preset: Preset, device: str) -> LlamaForCausalLM:
    """Return a Llama of that size with random weights, made where it is trained."""
    config = LlamaConfig(
        hidden_size=preset.width,
        intermediate_size=preset.inner,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        num_key_value_heads=preset.key_value_heads,
        vocab_size=preset.vocabulary,
        max_position_embeddings=preset.tokens,
        use_cache=False,
    )
    with torch.device(device):
        return LlamaForCausalLM(config)


def batches(loader: DataLoader[Tensor], device: str) -> Iterator[Tensor]:
    """Yield batches (batch, tokens) for ever, epoch after epoch."""
    for epoch in count():
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for batch in loader:
            yield batch.to(device, non_blocking=True)


def load(arguments: argparse.Namespace, preset: Preset, ranks: Ranks) -> DataLoader[Tensor]:
    """Return the loader of this rank's share of every batch."""
    batch_size = arguments.batch_size or preset.batch_size
    if arguments.documents < batch_size:
        raise SystemExit("the batch is larger than the data: raise --documents")
    if batch_size % ranks.world:
        raise SystemExit(f"a batch of {batch_size} is not shared evenly by {ranks.world} ranks")
    documents = Documents(arguments.documents, preset, arguments.seed)
    sampler: DistributedSampler[Tensor] | None = None
    if arguments.parallel != "none":
        sampler = DistributedSampler(
            documents, ranks.world, ranks.rank, seed=arguments.seed, drop_last=True
        )
    return DataLoader(
        documents,
        batch_size // ranks.world,
        shuffle=sampler is None,
        sampler=sampler,
        drop_last=True,
        pin_memory=torch.device(ranks.device).type == "cuda",
        generator=torch.Generator().manual_seed(arguments.seed),
    )


def train(arguments: argparse.Namespace) -> None:
    """Train, and end with the samples per second."""
    torch.manual_seed(arguments.seed)
    preset = PRESETS[arguments.preset]
    ranks = join(arguments)
    device = ranks.device
    loader = load(arguments, preset, ranks)
    model: nn.Module = build_model(preset, built_on(arguments, ranks))
    blocks = list(model.get_submodule("model.layers").children())
    prepare(model, blocks, arguments)
    model = spread(model, blocks, arguments, ranks)
    optimizer = adamw(model.parameters(), arguments, lr=preset.learning_rate, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=arguments.steps)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    speaks = ranks.rank == 0
    if speaks:
        print(f"{parameters / 1e6:.1f} M parameters, {arguments.steps} steps, on {device}")

    losses = arguments.losses.open("w") if arguments.losses and speaks else None
    precision = autocast(arguments)
    source = batches(loader, device)
    started = time.perf_counter()
    for step in range(arguments.steps):
        batch = next(source)
        total = torch.zeros((), device=device)
        parts = batch.split(arguments.micro_batch or len(batch))
        for part in parts:
            with reducing(model, last=part is parts[-1]):
                with precision:
                    loss = model(input_ids=part, labels=part).loss * (len(part) / len(batch))
                loss.backward()
            total += loss.detach()
        if not arguments.no_clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        logs = step % arguments.log_every == 0 or step == arguments.steps - 1
        if logs or arguments.losses:
            shown = mean(total, ranks)
            if losses is not None:
                print(repr(shown), file=losses, flush=True)
            if logs and speaks:
                print(f"step {step} loss {shown!r}", flush=True)
    seconds = time.perf_counter() - started
    if losses is not None:
        losses.close()
    rate = arguments.steps * len(batch) * ranks.world / seconds
    if speaks:
        print(f"done: {rate:.2f} samples/s, {seconds / arguments.steps:.3f} s a step")


if __name__ == "__main__":
    train(parse_arguments())
    leave()
