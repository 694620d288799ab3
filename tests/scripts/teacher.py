"""A student learns from a teacher. The teacher runs with gradients, but no optimizer has it."""

import argparse

import torch
from model import Net
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
args = parser.parse_args()


class Teacher(Net):
    pass


torch.manual_seed(0)
teacher, student = Teacher(width=64), Net()
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
for step in range(1, 21):
    x = torch.randn(16, 8)
    told = teacher(x).detach().softmax(-1)
    loss = F.kl_div(student(x).log_softmax(-1), told, reduction="batchmean")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.6f}")
torch.save(student.state_dict(), args.out)
