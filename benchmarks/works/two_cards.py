"""Three plain trainings of float32 weights: DeBERTa-v3-large, Swin-V2-base, or a CLIP two-tower.

    python benchmarks/works/two_cards.py deberta [--precision bf16] [--optimizer fused]
    torchrun --nproc-per-node 2 benchmarks/works/two_cards.py deberta --parallel ddp

With ``--parallel`` the whole batch is shared out by hand, so a step is that of one card. CLIP's
loss compares all samples, so its features are gathered with their gradients.
Prints each step's loss, and its speed in the second half.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from by_hand import adamw, add_flags, autocast, prepare
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_gather
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

from _ranks import join, mean

SIZES = {"deberta": 16, "swinv2": 64, "clip": 256}
parser = argparse.ArgumentParser()
parser.add_argument("work", choices=tuple(SIZES))
parser.add_argument("--device", default="cuda")
parser.add_argument("--batch", type=int)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--profile", help="write a trace of three steps to this file")
parser.add_argument("--parallel", choices=("none", "ddp", "zero2", "full"), default="none")
add_flags(parser)
options = parser.parse_args()


class TwoTower(nn.Module):
    """A picture encoder and a text encoder; returns the features of both."""

    def __init__(self) -> None:
        super().__init__()
        import timm

        self.image = timm.create_model("vit_base_patch16_224", num_classes=512)
        layer = nn.TransformerEncoderLayer(
            512, 8, 2048, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.embed = nn.Embedding(49408, 512)
        self.text = nn.TransformerEncoder(layer, 12)
        self.scale = nn.Parameter(torch.tensor(2.66))

    def forward(self, image: Tensor, text: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        i = functional.normalize(self.image(image), dim=-1)
        t = functional.normalize(self.text(self.embed(text)).mean(1), dim=-1)
        if options.parallel != "none":
            i, t = (torch.cat(all_gather(each.contiguous())) for each in (i, t))
        return self.scale.exp() * i @ t.T


def deberta() -> tuple[nn.Module, list[nn.Module]]:
    """Return DeBERTa-v3-large for tokens, and its blocks."""
    from transformers import DebertaV2Config, DebertaV2ForTokenClassification

    config = DebertaV2Config(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        vocab_size=128100,
        relative_attention=True,
        position_buckets=256,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type="p2c|c2p",
        max_relative_positions=-1,
        position_biased_input=False,
        type_vocab_size=0,
        num_labels=9,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = DebertaV2ForTokenClassification(config)
    return model, list(model.deberta.encoder.layer)


def swinv2() -> tuple[nn.Module, list[nn.Module]]:
    """Return Swin-V2-base, and its blocks."""
    import timm

    model = timm.create_model("swinv2_base_window8_256", num_classes=1000)
    return model, [block for layer in model.layers for block in layer.blocks]


def clip() -> tuple[nn.Module, list[nn.Module]]:
    """Return the two-tower, and its blocks."""
    model = TwoTower()
    return model, [*model.image.blocks, *model.text.layers]


def batch_of(step: int, size: int, device: str) -> dict[str, Tensor]:
    """Return a batch of random samples."""
    draws = torch.Generator(device).manual_seed(step)

    def whole(most: int, *shape: int) -> Tensor:
        return torch.randint(most, (size, *shape), device=device, generator=draws)

    if options.work == "deberta":
        words = whole(128000, 512)
        return {
            "input_ids": words,
            "attention_mask": torch.ones_like(words),
            "labels": whole(9, 512),
        }
    if options.work == "swinv2":
        pictures = torch.randn(size, 3, 256, 256, device=device, generator=draws)
        return {"x": pictures, "labels": whole(1000)}
    pictures = torch.randn(size, 3, 224, 224, device=device, generator=draws)
    return {"image": pictures, "text": whole(49408, 64)}


def loss_of(model: Callable[..., object], batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of a batch."""
    if options.work == "deberta":
        return model(**batch).loss
    if options.work == "swinv2":
        return functional.cross_entropy(model(batch["x"]), batch["labels"])
    logits = model(**batch)
    pairs = torch.arange(len(logits), device=logits.device)
    return (functional.cross_entropy(logits, pairs) + functional.cross_entropy(logits.T, pairs)) / 2


def main() -> None:
    """Train."""
    ranks = join(options)
    size = options.batch or SIZES[options.work]
    torch.manual_seed(0)
    model, blocks = {"deberta": deberta, "swinv2": swinv2, "clip": clip}[options.work]()
    model.to(ranks.device).train()
    prepare(model, blocks, options)
    if options.parallel == "ddp":
        on_card = torch.device(ranks.device).type == "cuda"
        model = DistributedDataParallel(model, [ranks.device] if on_card else None)
    elif options.parallel != "none":
        again = options.parallel == "full"
        for each in (*blocks, model):
            fully_shard(each, reshard_after_forward=again)
    optimizer = adamw(model.parameters(), options, lr=1e-5, weight_decay=0.01)
    times, profile = [], None
    for step in range(options.steps):
        if options.profile and ranks.rank == 0 and step == options.steps - 4:
            profile = torch.profiler.profile()
            profile.start()
        own = size // ranks.world
        first = ranks.rank * own
        batch = batch_of(step, size, ranks.device)
        batch = {name: each[first : first + own] for name, each in batch.items()}
        with autocast(options):
            loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        value = mean(loss.detach(), ranks)
        times.append(time.perf_counter())
        if ranks.rank == 0:
            print(f"step {step} loss {value:.6f}", flush=True)
    if profile is not None:
        profile.stop()
        profile.export_chrome_trace(options.profile)
    last = times[len(times) // 2 : -4]
    seconds = statistics.median(b - a for a, b in pairwise(last))
    if ranks.rank == 0:
        print(f"speed {size / seconds:.1f} samples/s", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


main()
