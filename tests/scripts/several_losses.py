"""Two heads, three losses added up, one of them on the weights."""

import argparse

import torch
from model import Net
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
parser.add_argument("--batch-size", type=int, default=16)
args = parser.parse_args()


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Net(outputs=16)
        self.classes = nn.Linear(16, 4)
        self.back = nn.Linear(16, 8)

    def forward(self, x):
        features = torch.tanh(self.body(x))
        return self.classes(features), self.back(features)


torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = TwoHeads()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(20):
    x = torch.randn(args.batch_size, 8)
    logits, again = model(x)
    label_loss = nn.functional.cross_entropy(logits, x[:, :4].argmax(1))
    same_loss = nn.functional.mse_loss(again, x)
    small = sum(p.square().sum() for p in model.parameters() if p.ndim > 1)
    loss = label_loss + 0.3 * same_loss + 1e-3 * small
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 4:
        parts = " ".join(f"{each.item():.12f}" for each in (label_loss, same_loss, small))
        print(f"step {step + 1} losses {parts}")
torch.save(model.state_dict(), args.out)
