"""A tokenizer is trained for three steps and frozen. Then the model is trained on its codes."""

import argparse

import torch
from model import Net
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
args = parser.parse_args()


class Tokenizer(nn.Sequential):
    pass


torch.manual_seed(0)
tokenizer = Tokenizer(nn.Linear(12, 8), nn.Linear(8, 12))
optimizer = torch.optim.Adam(tokenizer.parameters(), lr=1e-3)
for _ in range(3):
    x = torch.randn(32, 12)
    loss = F.mse_loss(tokenizer(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
tokenizer.requires_grad_(False)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(1, 21):
    x = torch.randn(16, 12)
    loss = F.cross_entropy(model(tokenizer[0](x)), x[:, :4].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.6f}")
torch.save(model.state_dict(), args.out)
