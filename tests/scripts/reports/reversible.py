"""Reversible layers: a function rebuilds its inputs and runs a backward in its backward.

Source: https://github.com/lucidrains/reformer-pytorch/issues/29
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F


class Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx, one, two, layers):
        for layer in layers:
            with torch.no_grad():
                one = one + layer.f(two)
                two = two + layer.g(one)
        ctx.layers, ctx.ends = layers, (one.detach(), two.detach())
        return one, two

    @staticmethod
    def backward(ctx, d_one, d_two):
        one, two = ctx.ends
        for layer in reversed(ctx.layers):
            with torch.enable_grad():
                g = layer.g(one.requires_grad_())
            torch.autograd.backward(g, d_two)
            d_one = d_one + one.grad
            two = (two - g).detach()
            with torch.enable_grad():
                f = layer.f(two.requires_grad_())
            torch.autograd.backward(f, d_one)
            d_two = d_two + two.grad
            one, two = (one - f).detach(), two.detach()
        return d_one, d_two, None


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.f, self.g = (
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)
            )
            for _ in "fg"
        )


class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.first, self.head = nn.Linear(8, width), nn.Linear(2 * width, 5)
        self.layers = nn.ModuleList(Layer(width) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        return self.head(torch.cat(Reversible.apply(x, x, self.layers), -1))


parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
args = parser.parse_args()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    x, y = torch.randn(16, 8), torch.randint(5, (16,))
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 3:
        print(f"step {step} loss {loss.item():.10f}")
torch.save(model.state_dict(), args.out)
