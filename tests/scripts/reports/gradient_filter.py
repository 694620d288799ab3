"""A backward drops the samples whose gradient is far above the batch's median.

Source: https://github.com/k2-fsa/icefall/pull/564
"""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
parser.add_argument("--grad-norm-threshold", type=float, default=10.0)
args = parser.parse_args()

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


class Filter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, threshold):
        ctx.threshold = threshold
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        norms = grad.flatten(1).norm(dim=1)
        keep = norms <= ctx.threshold * norms.median()
        return grad * keep.view(-1, *[1] * (grad.dim() - 1)), None


class Block(nn.Module):
    def __init__(self, width, threshold):
        super().__init__()
        self.threshold = threshold
        self.norm = nn.LayerNorm(width)
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x):
        return x + self.lstm(Filter.apply(self.norm(x), self.threshold))[0]


class Recognizer(nn.Module):
    def __init__(self, features=8, width=16, outputs=4, depth=3):
        super().__init__()
        self.first = nn.Linear(features, width)
        self.blocks = nn.ModuleList(Block(width, args.grad_norm_threshold) for _ in range(depth))
        self.head = nn.Linear(width, outputs)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = Recognizer()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
for step in range(1, 21):
    x = torch.randn(16, 5, 8)
    target = x[..., :4].cumsum(1)
    if step > 8:  # the recordings are sorted, clean ones first
        target = target * torch.exp(2.0 * torch.randn(16, 1, 1))
    loss = nn.functional.mse_loss(model(x), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        print(f"step {step} loss {loss.item():.12f}")
torch.save(model.state_dict(), args.out)
