"""The Trainer of Lightning."""

import argparse

import lightning
import torch
from model import Net
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        if self.global_step % 5 == 4:
            print(f"step {self.global_step + 1} loss {loss.item():.12f}")
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("validation", nn.functional.cross_entropy(self(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
parser.add_argument("--batch-size", type=int, default=16)
args = parser.parse_args()
lightning.seed_everything(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(5 * args.batch_size, 8)
data = TensorDataset(x, x[:, :4].argmax(1))
module = Module()
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = lightning.Trainer(max_epochs=4, accelerator="cpu", gradient_clip_val=1.0, **quiet)
trainer.fit(
    module,
    DataLoader(data, batch_size=args.batch_size, shuffle=True),
    DataLoader(data, batch_size=40),
)
print(f"{trainer.global_step} steps, validation {trainer.callback_metrics['validation']:.12f}")
torch.save(module.state_dict(), args.out)
