"""A U-Net on a card: its stages are held one by one and keep statistics of their batches."""

from __future__ import annotations

import argparse

import torch
from torch import nn


class Stage(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        after: torch.Tensor = self.layers(x)
        return after


class Down(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2)
        self.stage = Stage(width, 2 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        after: torch.Tensor = self.stage(self.pool(x))
        return after


class Up(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.stage = Stage(2 * width, width)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        after: torch.Tensor = self.stage(torch.cat([skip, self.up(x)], dim=1))
        return after


class UNet(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.into = Stage(3, width)
        self.down1, self.down2, self.down3 = Down(width), Down(2 * width), Down(4 * width)
        self.up1, self.up2, self.up3 = Up(4 * width), Up(2 * width), Up(width)
        self.out = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.into(x)
        two = self.down1(one)
        three = self.down2(two)
        up = self.up2(self.up1(self.down3(three), three), two)
        after: torch.Tensor = self.out(self.up3(up, one))
        return after


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", default="unet.pt")
    args = parser.parse_args()
    torch.backends.cudnn.deterministic = True
    torch.manual_seed(0)
    model = UNet().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(args.steps):
        images = torch.randn(24, 3, 256, 256, device="cuda")
        classes = (images.mean(1) > 0).long()
        loss = nn.functional.cross_entropy(model(images), classes)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    torch.save({"state": model.state_dict(), "loss": loss.item()}, args.out)
    print(torch.cuda.max_memory_allocated())


if __name__ == "__main__":
    main()
