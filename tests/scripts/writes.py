"""Writes where its user's other files are: beside itself, to an absolute folder, to ~/.cache."""

import argparse
from pathlib import Path

import torch
from model import Net
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--folder", type=Path, default=Path("runs"))
args = parser.parse_args()

cache = Path.home() / ".cache" / "writes"
for folder in (args.folder, cache):
    folder.mkdir(parents=True, exist_ok=True)
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(1, args.steps + 1):
    x = torch.randn(16, 8)
    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.12f}")
        with open("log.csv", "a") as log:
            log.write(f"{step},{loss.item():.12f}\n")
        torch.save(model.state_dict(), args.folder / f"step{step}.pt")
        (cache / "last.txt").write_text(f"{step}\n")
torch.save(model.state_dict(), args.out)
