"""The script scales its loss, unscales to clip, and lets the scale grow."""

import argparse

import torch
from model import Net
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
parser.add_argument("--batch-size", type=int, default=16)
args = parser.parse_args()

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", growth_interval=5)
for step in range(20):
    x = torch.randn(args.batch_size, 8)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 5 == 4:
        scale = scaler.get_scale()
        print(f"step {step + 1} loss {loss.item():.12f} norm {norm:.12f} scale {scale:.0f}")
torch.save(model.state_dict(), args.out)
