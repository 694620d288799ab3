"""Styles of pictures are mixed within the batch, in half of the calls.

Source: https://github.com/KaiyangZhou/Dassl.pytorch/issues/23
"""

import argparse
import random

import torch
from torch import nn
from torch.nn import functional as F


class MixStyle(nn.Module):
    def __init__(self, p=0.5):
        super().__init__()
        self.p = p

    def forward(self, x):
        if not self.training or random.random() > self.p:
            return x
        mean, std = x.mean((2, 3), keepdim=True), x.std((2, 3), keepdim=True) + 1e-6
        share = torch.rand(len(x), 1, 1, 1)
        other = torch.randperm(len(x))
        normed = (x - mean) / std
        return (
            normed * (share * std + (1 - share) * std[other])
            + share * mean
            + (1 - share) * mean[other]
        )


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return x + self.conv(torch.relu(self.norm(x)))


class Net(nn.Module):
    def __init__(self, width=16, classes=4):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.mix = MixStyle()
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.mix(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="model.pt")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.set_default_dtype(torch.float64)
    model = Net()
    model.stem.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for step in range(20):
        images = torch.randn(16, 3, 8, 8)
        loss = F.cross_entropy(model(images), images.mean((2, 3)).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 3:
            print(f"step {step} loss {loss.item():.9f}")
    torch.save(model.state_dict(), args.out)


if __name__ == "__main__":
    main()
