"""Neurons keep their potential, with its graph, over the calls of a step.

Source: https://github.com/fangwei123456/spikingjelly/issues/318
"""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
parser.add_argument("--times", type=int, default=4)
args = parser.parse_args()

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


class Neuron(nn.Module):
    def __init__(self, tau=2.0):
        super().__init__()
        self.tau = tau
        self.v = 0.0

    def forward(self, x):
        self.v = self.v + (x - self.v) / self.tau
        spike = torch.sigmoid(4.0 * (self.v - 1.0))
        self.v = self.v * (1.0 - spike)
        return spike

    def reset(self):
        self.v = 0.0


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.neuron = Neuron()

    def forward(self, x):
        return x + self.neuron(self.linear(x))


class Spiking(nn.Module):
    def __init__(self, inputs=8, width=16, outputs=4, depth=4):
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, outputs)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


net = Spiking()
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
for step in range(1, 21):
    x = torch.randn(16, 8)
    y = x[:, :4].argmax(1)
    rate = 0.0
    for _ in range(args.times):
        rate = rate + net(x)
    loss = nn.functional.cross_entropy(rate / args.times, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for module in net.modules():
        if hasattr(module, "reset"):
            module.reset()
    if step % 4 == 0:
        print(f"step {step} loss {loss.item():.12f}")
torch.save(net.state_dict(), args.out)
