"""A contrastive loss over the pairs in the batch, computed in the loop from two models' outputs."""

import argparse

import torch
from model import Net
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
parser.add_argument("--batch-size", type=int, default=16)
args = parser.parse_args()

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
image_model, text_model = Net(outputs=16), Net(inputs=6, outputs=16)
parameters = [*image_model.parameters(), *text_model.parameters()]
optimizer = torch.optim.AdamW(parameters, lr=1e-2)
for step in range(1, 21):
    images = torch.randn(args.batch_size, 8)
    left = F.normalize(image_model(images), dim=-1)
    right = F.normalize(text_model(images[:, :6].sin()), dim=-1)
    loss = F.cross_entropy(5 * left @ right.T, torch.arange(args.batch_size))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.12f}")
torch.save([image_model.state_dict(), text_model.state_dict()], args.out)
