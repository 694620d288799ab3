"""A scheduler step at the end of each epoch, two groups of parameters."""

import argparse

import torch
from model import Net
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
parser.add_argument("--batch-size", type=int, default=16)
args = parser.parse_args()

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(5 * args.batch_size, 8)
loader = DataLoader(
    TensorDataset(x, x.sum(1, keepdim=True)), batch_size=args.batch_size, shuffle=True
)
model = Net(outputs=1)
decayed = [p for p in model.parameters() if p.ndim > 1]
others = [p for p in model.parameters() if p.ndim == 1]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
for epoch in range(4):
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scheduler.step()
    rates = [group["lr"] for group in optimizer.param_groups]
    print(f"epoch {epoch} loss {loss.item():.12f} lr {rates} of scheduler {scheduler.last_epoch}")
torch.save(model.state_dict(), args.out)
