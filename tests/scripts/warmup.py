"""A warm-up by LambdaLR, then cosine: a scheduler step after each optimizer step."""

import argparse
import math

import torch
from model import Net
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
parser.add_argument("--batch-size", type=int, default=16)
args = parser.parse_args()


def rate(step):
    return (step + 1) / 5 if step < 5 else 0.5 * (1 + math.cos(math.pi * (step - 5) / 15))


torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
for step in range(20):
    x = torch.randn(args.batch_size, 8)
    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 4 == 3:
        lr = scheduler.get_last_lr()[0]
        print(f"step {step + 1} of scheduler {scheduler.last_epoch} lr {lr:.9f} loss {loss:.12f}")
torch.save(model.state_dict(), args.out)
