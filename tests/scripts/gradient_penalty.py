"""A critic with a gradient penalty: torch.autograd.grad with create_graph through the model."""

import argparse

import torch
from model import Net

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
args = parser.parse_args()

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
critic = Net(outputs=1)
optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
for step in range(1, 21):
    real, fake = torch.randn(16, 8) + 1, torch.randn(16, 8)
    mixed = torch.lerp(real, fake, torch.rand(16, 1)).requires_grad_()
    (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.12f} penalty {penalty.item():.12f}")
torch.save(critic.state_dict(), args.out)
