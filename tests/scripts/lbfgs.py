"""LBFGS calls its closure several times a step."""

import argparse

import torch
from model import Net
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
parser.add_argument("--batch-size", type=int, default=16)
args = parser.parse_args()

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = Net(outputs=1)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
x = torch.randn(args.batch_size, 8)
y = x.sum(1, keepdim=True)
calls = 0
for step in range(20):

    def closure():
        global calls
        calls += 1
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    if step % 5 == 4:
        print(f"step {step + 1} calls {calls} loss {loss.item():.12f}")
torch.save(model.state_dict(), args.out)
