"""Accelerate: prepare the model, optimizer, loader and scheduler; clip through it."""

import argparse

import torch
from accelerate import Accelerator
from model import Net
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
parser.add_argument("--batch-size", type=int, default=16)
args = parser.parse_args()

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
accelerator = Accelerator(cpu=True)
x = torch.randn(5 * args.batch_size, 8)
loader = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=args.batch_size)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for epoch in range(4):
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    rate = scheduler.get_last_lr()[0]
    accelerator.print(f"epoch {epoch} loss {accelerator.gather(loss).mean():.12f} lr {rate:.9f}")
torch.save(accelerator.unwrap_model(model).state_dict(), args.out)
