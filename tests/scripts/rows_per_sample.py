"""A language model that returns a row for each token, batch and time flattened together."""

import argparse

import torch
from model import Block
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
parser.add_argument("--batch-size", type=int, default=16)
args = parser.parse_args()


class Characters(nn.Module):
    def __init__(self, letters=20, width=16):
        super().__init__()
        self.letters = nn.Embedding(letters, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, letters)

    def forward(self, text):
        x = self.letters(text)
        x = x + x.cumsum(1) / torch.arange(1, text.shape[1] + 1).unsqueeze(-1)
        for block in self.blocks:
            x = block(x)
        return self.head(x).view(-1, 20)


torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
text = torch.randint(20, (1000,)).cumsum(0) % 20
model = Characters()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(1, 21):
    starts = torch.randint(len(text) - 13, (args.batch_size,))
    windows = torch.stack([text[start : start + 13] for start in starts])
    loss = nn.functional.cross_entropy(model(windows[:, :-1]), windows[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.12f}")
torch.save(model.state_dict(), args.out)
