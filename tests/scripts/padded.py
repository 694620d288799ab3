"""Sentences of unequal length, padded; the loss outside ignores what is padding."""

import argparse

import torch
from model import Block
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
parser.add_argument("--batch-size", type=int, default=16)
args = parser.parse_args()


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(30, 16, padding_idx=0)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.head = nn.Linear(16, 5)

    def forward(self, words):
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def collate(rows):
    words = pad_sequence(rows, batch_first=True)
    tags = pad_sequence([row % 5 for row in rows], batch_first=True, padding_value=-100)
    return words, tags


torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
rows = [
    torch.randint(1, 30, (int(length),)) for length in torch.randint(2, 12, (20 * args.batch_size,))
]
model = Tagger()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
criterion = nn.CrossEntropyLoss(ignore_index=-100)
for step, (words, tags) in enumerate(
    DataLoader(rows, args.batch_size, collate_fn=collate), start=1
):
    logits = model(words)
    loss = criterion(logits.flatten(0, 1), tags.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.12f} shape {tuple(words.shape)}")
torch.save(model.state_dict(), args.out)
