"""ReduceLROnPlateau, fed with a validation loss."""

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
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=1)
held_out = torch.randn(32, 8)
for step in range(20):
    model.train()
    x = torch.randn(args.batch_size, 8)
    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        validation = nn.functional.cross_entropy(model(held_out), held_out[:, :4].argmax(1))
    scheduler.step(validation)
    if step % 4 == 3:
        print(f"step {step + 1} validation {validation:.12f} lr {scheduler.get_last_lr()[0]:.9f}")
torch.save(model.state_dict(), args.out)
