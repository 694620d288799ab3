"""A copy of the model tries five learning rates on 8 samples each. Then the model is trained."""

import argparse
import copy

import torch
from model import Net
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
args = parser.parse_args()

torch.manual_seed(0)
model = Net()
tried = copy.deepcopy(model)
finder = torch.optim.SGD(tried.parameters(), lr=1e-5)
for _ in range(5):
    x = torch.randn(8, 8)
    loss = F.cross_entropy(tried(x), x[:, :4].argmax(1))
    finder.zero_grad()
    loss.backward()
    finder.step()
    finder.param_groups[0]["lr"] *= 3
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 21):
    x = torch.randn(16, 8)
    loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.6f}")
torch.save(model.state_dict(), args.out)
