"""A tensor hook in the forward limits the gradient of each sample.

Source: https://github.com/k2-fsa/icefall/pull/560
"""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
parser.add_argument("--accumulate", type=int, default=4)
parser.add_argument("--grad-max-norm", type=float, default=1e-3)
args = parser.parse_args()

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


def clip(grad):
    norm = grad.norm(dim=-1, keepdim=True)
    return grad * (args.grad_max_norm / (norm + 1e-12)).clamp(max=1.0)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.cell = nn.GRUCell(width, width)

    def forward(self, x):
        hidden, outputs = x.new_zeros(len(x), x.shape[-1]), []
        for step in self.norm(x).unbind(1):
            hidden = self.cell(step, hidden)
            if hidden.requires_grad:
                hidden.register_hook(clip)
            outputs.append(hidden)
        return x + torch.stack(outputs, 1)


class Model(nn.Module):
    def __init__(self, features=8, width=16, classes=6, depth=3):
        super().__init__()
        self.first = nn.Linear(features, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, speech, labels):
        x = self.first(speech)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for iteration in range(1, 81):
    speech = torch.randn(16, 5, 8)
    loss = model(speech, speech[..., :6].cumsum(1).argmax(-1))
    (loss / args.accumulate).backward()
    if iteration % args.accumulate == 0:
        optimizer.step()
        optimizer.zero_grad()
    if iteration % 16 == 0:
        print(f"iteration {iteration} loss {loss.item():.12f}")
torch.save(model.state_dict(), args.out)
