"""The model takes the batch as it comes from the loader: nested tuples, a number and a name."""

import argparse

import torch
from model import Net
from torch import nn
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
parser.add_argument("--batch-size", type=int, default=16)
args = parser.parse_args()


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = Net(), Net()

    def forward(self, batch, temperature, which):
        (left, right), bias = batch
        logits = (self.left(left) + self.right(right)) / temperature + bias
        return logits if which == "logits" else logits.softmax(-1)


torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
data = [
    ((torch.randn(8), torch.randn(8)), torch.randn(4), i % 4) for i in range(20 * args.batch_size)
]
model = Pair()
optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2)
for step, (pair, bias, labels) in enumerate(DataLoader(data, batch_size=args.batch_size), start=1):
    loss = nn.functional.cross_entropy(model((pair, bias), 2.0, "logits"), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.12f}")
torch.save(model.state_dict(), args.out)
