"""Two models, two optimizers: a GAN."""

import argparse

import torch
from model import Net
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
parser.add_argument("--batch-size", type=int, default=16)
args = parser.parse_args()

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
generator = Net(inputs=4, outputs=8)
discriminator = Net(inputs=8, outputs=1)
for_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
for_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9))
criterion = nn.BCEWithLogitsLoss()
real, fake = torch.ones(args.batch_size, 1), torch.zeros(args.batch_size, 1)
for step in range(20):
    images = torch.randn(args.batch_size, 8) * 0.5 + 1
    made = generator(torch.randn(args.batch_size, 4))

    for_discriminator.zero_grad()
    on_real = criterion(discriminator(images), real)
    on_fake = criterion(discriminator(made.detach()), fake)
    (on_real + on_fake).backward()
    for_discriminator.step()

    for_generator.zero_grad()
    fooled = criterion(discriminator(made), real)
    fooled.backward()
    for_generator.step()
    if step % 5 == 4:
        d, g = (on_real + on_fake).item(), fooled.item()
        print(f"step {step + 1} discriminator {d:.12f} generator {g:.12f}")
both = {"generator": generator.state_dict(), "discriminator": discriminator.state_dict()}
torch.save(both, args.out)
