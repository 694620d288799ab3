"""A contrastive loss over the pairs in the batch, computed inside the model."""

import argparse

import torch
from model import Net
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
args = parser.parse_args()


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.images, self.texts = Net(outputs=16), Net(inputs=6, outputs=16)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images, texts):
        images = F.normalize(self.images(images), dim=-1)
        texts = F.normalize(self.texts(texts), dim=-1)
        logits = self.scale.exp() * images @ texts.T
        labels = torch.arange(len(logits))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = Clip()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(1, 21):
    images = torch.randn(16, 8)
    loss = model(images, images[:, :6].sin())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.12f}")
torch.save(model.state_dict(), args.out)
