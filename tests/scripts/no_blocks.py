"""A multi-layer perceptron without repeated blocks."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
args = parser.parse_args()

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(1, 21):
    x = torch.randn(16, 8)
    loss = nn.functional.l1_loss(model(x).squeeze(-1), x.norm(dim=1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.12f}")
torch.save(model.state_dict(), args.out)
