"""Batches are dicts, handed to the model as keyword arguments."""

import argparse

import torch
from model import Net
from torch import nn
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
parser.add_argument("--batch-size", type=int, default=16)
args = parser.parse_args()


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, inputs, labels=None, scale=1.0):
        logits = self.net(inputs) * scale
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
rows = torch.randn(20 * args.batch_size, 8)
data = [{"inputs": row, "labels": row[:4].argmax()} for row in rows]
model = Named()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step, batch in enumerate(DataLoader(data, batch_size=args.batch_size), start=1):
    output = model(**batch, scale=0.5)
    optimizer.zero_grad()
    output["loss"].backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {output['loss'].item():.12f} {tuple(output['logits'].shape)}")
torch.save(model.state_dict(), args.out)
