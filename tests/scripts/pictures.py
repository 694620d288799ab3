"""The model takes a list of pictures of unequal size, and pads them itself."""

import argparse

import torch
from model import Block
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
args = parser.parse_args()


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, pictures, targets):
        height = max(each.shape[1] for each in pictures)
        width = max(each.shape[2] for each in pictures)
        padded = [
            F.pad(each, (0, width - each.shape[2], 0, height - each.shape[1])) for each in pictures
        ]
        x = self.stem(torch.stack(padded)).mean((2, 3))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), torch.stack([each["label"] for each in targets]))


torch.manual_seed(0)
model = Detector()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(1, 21):
    sizes = torch.randint(8, 20, (16, 2)).tolist()
    pictures = [torch.rand(3, height, width) for height, width in sizes]
    targets = [{"label": torch.tensor(index % 4)} for index in range(16)]
    loss = model(pictures, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.6f}")
torch.save(model.state_dict(), args.out)
