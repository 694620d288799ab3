"""An encoder of 24 layers and 1024 features in Lightning, float32: 16 x 512 tokens."""

import argparse

import lightning
import torch
from by_hand import adamw, add_flags, prepare
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

WORDS = 32000
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--steps", type=int, default=1000)
add_flags(parser)
options = parser.parse_args()


class Encoder(lightning.LightningModule):
    """Learns to repeat its input."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(1024, 16, 4096, 0.1, "gelu", batch_first=True)
        self.embed = nn.Embedding(WORDS, 1024)
        self.encoder = nn.TransformerEncoder(layer, 24, enable_nested_tensor=False)
        self.head = nn.Linear(1024, WORDS)
        prepare(self, self.encoder.layers, options)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        (words,) = batch
        logits = self.head(self.encoder(self.embed(words)))
        return functional.cross_entropy(logits.flatten(0, 1), words.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.parameters(), options, lr=1e-4, weight_decay=0.1)


lightning.seed_everything(0)
micro = options.micro_batch or options.batch
trainer = lightning.Trainer(
    max_steps=options.steps,
    precision="bf16-mixed" if options.precision == "bf16" else "32-true",
    accumulate_grad_batches=options.batch // micro,
    logger=False,
    enable_checkpointing=False,
    devices=1,
)
trainer.fit(Encoder(), DataLoader(TensorDataset(torch.randint(WORDS, (2048, 512))), micro))
