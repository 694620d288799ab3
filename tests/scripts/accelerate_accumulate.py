"""Accelerate: gradients accumulated under accelerator.accumulate, four batches a step."""

import argparse

import torch
from accelerate import Accelerator
from model import Net
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
parser.add_argument("--batch-size", type=int, default=16)
args = parser.parse_args()

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
x = torch.randn(80 * args.batch_size, 8)
loader = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=args.batch_size)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
steps = 0
for inputs, labels in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        steps += 1
        if steps % 5 == 0:
            print(f"step {steps} loss {loss.item():.12f}")
torch.save(accelerator.unwrap_model(model).state_dict(), args.out)
