"""A module script with relative imports."""

import argparse

import torch
from torch import nn

from .layers import build


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="model.pt")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, 21):
        x = torch.randn(16, 8)
        loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.12f} in {__package__}")
    torch.save(model.state_dict(), args.out)


main()
