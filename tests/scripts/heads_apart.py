"""One body, two heads: the script calls each of the three, and not the model that holds them."""

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
        features = self.body(x)
        return self.classes(features), self.back(features)


torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = TwoHeads()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(20):
    x = torch.randn(args.batch_size, 8)
    logits, again = model.forward(x)
    label_loss = nn.functional.cross_entropy(logits, x[:, :4].argmax(1))
    same_loss = nn.functional.mse_loss(again, x)
    optimizer.zero_grad()
    (label_loss + same_loss).backward()
    optimizer.step()
    if step % 5 == 4:
        print(f"step {step + 1} losses {label_loss.item():.12f} {same_loss.item():.12f}")
torch.save(model.state_dict(), args.out)
