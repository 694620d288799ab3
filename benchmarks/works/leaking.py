"""A loop that keeps the graph of each step; --small for a CPU."""

import sys

import torch
from torch import nn

WIDTH = 64 if "--small" in sys.argv else 4096
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)))
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
history = []
for _step in range(60):
    x = torch.randn(256, WIDTH, device=device)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss)
