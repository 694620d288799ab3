"""EnCodec's balancer: autograd.grad of each loss for the output, then one backward.

Source: https://github.com/facebookresearch/encodec/issues/47
"""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
args = parser.parse_args()

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(
            nn.ELU(),
            nn.Conv1d(width, width // 2, 3, padding=1),
            nn.ELU(),
            nn.Conv1d(width // 2, width, 1),
        )

    def forward(self, x):
        return x + self.net(x)


class Codec(nn.Module):
    def __init__(self, width=16, depth=4):
        super().__init__()
        self.first = nn.Conv1d(1, width, 7, padding=3)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last = nn.Conv1d(width, 1, 7, padding=3)

    def forward(self, wave):
        x = self.first(wave)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def spectrum(wave):
    return torch.fft.rfft(wave.squeeze(1).unfold(-1, 16, 8)).abs().square().add(0.1).log()


class Balancer:
    def __init__(self, weights, decay=0.9):
        self.weights, self.decay, self.norms = weights, decay, {}

    def backward(self, losses, output):
        total = 0.0
        for name, loss in losses.items():
            (grad,) = torch.autograd.grad(loss, [output], retain_graph=True)
            norm = grad.norm(dim=(1, 2)).mean().item()
            self.norms[name] = self.decay * self.norms.get(name, norm) + (1 - self.decay) * norm
            total = total + self.weights[name] * grad / (self.norms[name] + 1e-12)
        output.backward(total)


codec = Codec()
balancer = Balancer({"wave": 0.1, "mse": 0.1, "spectrum": 1.0})
optimizer = torch.optim.Adam(codec.parameters(), lr=0.001, betas=(0.5, 0.9))
time = torch.arange(64)
for step in range(1, 21):
    wave = torch.sin(time * torch.rand(16, 1, 1) + torch.rand(16, 1, 1)) + 0.05 * torch.randn(
        16, 1, 64
    )
    output = codec(wave)
    losses = {
        "wave": nn.functional.smooth_l1_loss(output, wave),
        "mse": nn.functional.mse_loss(output, wave),
        "spectrum": nn.functional.mse_loss(spectrum(output), spectrum(wave)),
    }
    optimizer.zero_grad()
    balancer.backward(losses, output)
    optimizer.step()
    if step % 4 == 0:
        print(f"step {step}", *(f"{name} {loss.item():.12f}" for name, loss in losses.items()))
torch.save(codec.state_dict(), args.out)
