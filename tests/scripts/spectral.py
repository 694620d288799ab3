"""A critic with parametrized weights: torch calls modules of its own when it makes them."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
args = parser.parse_args()


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = spectral_norm(nn.Linear(width, 2 * width))
        self.down = weight_norm(nn.Linear(2 * width, width))

    def forward(self, x):
        return x + self.down(F.leaky_relu(self.up(x), 0.2))


torch.manual_seed(0)
critic = nn.Sequential(nn.Linear(8, 16), *(Residual(16) for _ in range(4)), nn.Linear(16, 1))
optimizer = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
for step in range(1, 21):
    real, fake = torch.randn(16, 8) + 1, torch.randn(16, 8)
    loss = F.relu(1 - critic(real)).mean() + F.relu(1 + critic(fake)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.6f}")
torch.save(critic.state_dict(), args.out)
