"""A detector divides its loss by its positive anchors, at least one.

Later pictures have no object.

Source: https://github.com/yhenon/pytorch-retinanet/issues/98
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return x + self.conv(torch.relu(self.norm(x)))


class Detector(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.logits = nn.Conv2d(width, 1, 1)
        nn.init.constant_(self.logits.bias, -2.0)

    def forward(self, images, labels=None):
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        logits = self.logits(x).flatten(1)
        if not self.training:
            return {"scores": logits.sigmoid()}
        positive = labels > 0
        loss = F.binary_cross_entropy_with_logits(logits, positive.to(logits), reduction="none")
        p = logits.sigmoid()
        focal = torch.where(positive, 0.25 * (1 - p) ** 2, 0.75 * p**2) * loss
        return {"loss_cls": focal.sum() / max(1, positive.sum().item())}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="model.pt")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    images = torch.randn(320, 3, 6, 6)
    labels = (images.mean(1).flatten(1) > 0.9).long()
    labels[:, 0] = 1
    labels[160:][torch.rand(160) < 0.6] = 0  # background pictures, added to lower false positives
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(20):
        rows = slice(16 * step, 16 * step + 16)
        loss = sum(model(images[rows], labels[rows]).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 3:
            print(f"step {step} loss {loss.item():.9f}")
    torch.save(model.state_dict(), args.out)


if __name__ == "__main__":
    main()
