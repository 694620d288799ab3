"""MoCo: the forward moves the key encoder's weights and fills a queue of keys.

Source: https://github.com/salesforce/LAVIS/issues/120
"""

import argparse
import copy

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 32),
            nn.Linear(32, width),
        )

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Encoder(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.first, self.head = nn.Linear(8, width), nn.Linear(width, 8)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class MoCo(nn.Module):
    def __init__(self, K=64, m=0.99, T=0.2):
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.encoder_q = Encoder()
        self.encoder_k = copy.deepcopy(self.encoder_q).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(8, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, im_q, im_k):
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            for param_q, param_k in zip(
                self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True
            ):
                param_k.data = param_k.data * self.m + param_q.data * (1.0 - self.m)
            k = F.normalize(self.encoder_k(im_k), dim=1)
        pos = (q * k).sum(1, keepdim=True)
        logits = torch.cat([pos, q @ self.queue.clone().detach()], 1) / self.T
        with torch.no_grad():
            ptr = int(self.queue_ptr)
            assert self.K % len(k) == 0  # for simplicity
            self.queue[:, ptr : ptr + len(k)] = k.T
            self.queue_ptr[0] = (ptr + len(k)) % self.K
        return logits, torch.zeros(len(q), dtype=torch.long)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="model.pt")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = MoCo()
    optimizer = torch.optim.SGD(model.encoder_q.parameters(), lr=0.05, momentum=0.9)
    for step in range(20):
        x = torch.randn(16, 8)
        output, target = model(x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x))
        loss = F.cross_entropy(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 3:
            print(f"step {step} loss {loss.item():.9f}")
    torch.save(model.state_dict(), args.out)


if __name__ == "__main__":
    main()
