"""Saves a checkpoint every five steps, and goes on from it when it is there."""

import argparse
import os

import torch
from model import Net
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
parser.add_argument("--checkpoint", default="checkpoint.pt")
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=20)
first = 0
if os.path.exists(args.checkpoint):
    saved = torch.load(args.checkpoint)
    model.load_state_dict(saved["model"], strict=True)
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    torch.set_rng_state(saved["random"])
    first = saved["step"]
    print(f"resumed at step {first}")
for step in range(first + 1, args.steps + 1):
    x = torch.randn(16, 8)
    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step < 20:
        scheduler.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.12f} lr {scheduler.get_last_lr()[0]:.9f}")
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        states |= {"scheduler": scheduler.state_dict(), "random": torch.get_rng_state()}
        torch.save(states | {"step": step}, args.checkpoint)
torch.save(model.state_dict(), args.out)
