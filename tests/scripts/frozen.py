"""Fine-tuning: the body is frozen for ten steps, then thawed into a second group."""

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
body = [p for name, p in model.named_parameters() if not name.startswith("head")]
for parameter in body:
    parameter.requires_grad = False
optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-2)
for step in range(1, 21):
    if step == 11:
        for parameter in body:
            parameter.requires_grad = True
        optimizer.add_param_group({"params": body, "lr": 1e-3})
    x = torch.randn(args.batch_size, 8)
    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        print(f"step {step} loss {loss.item():.12f} training {trained}")
torch.save(model.state_dict(), args.out)
