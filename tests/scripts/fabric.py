"""Lightning Fabric: a loop of one's own, set up and run backward by it."""

import argparse

import torch
from lightning.fabric import Fabric
from model import Net
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
parser.add_argument("--batch-size", type=int, default=16)
args = parser.parse_args()

torch.set_default_dtype(torch.float64)
fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
fabric.seed_everything(0)
x = torch.randn(20 * args.batch_size, 8)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(
    DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=args.batch_size)
)
for step, (inputs, labels) in enumerate(loader, start=1):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    if step % 5 == 0:
        fabric.print(f"step {step} loss {loss.item():.12f}")
torch.save(model.state_dict(), args.out)
