"""A flat list of pictures, none or two for a sample, fills places among the tokens.

Source: https://github.com/Liquid4All/liquid-finetune/pull/29
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

PICTURE = 1


class Model(nn.Module):
    def __init__(self, words=40, width=32):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.tower = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 64, 0.0, batch_first=True, norm_first=True)
            for _ in range(3)
        )
        self.head = nn.Linear(width, words)

    def forward(self, input_ids, pixel_values, labels):
        x = self.embed(input_ids)
        where = (input_ids == PICTURE).unsqueeze(-1).expand_as(x)
        x = x.masked_scatter(where, self.tower(pixel_values.flatten(1)))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


def collate(numbers):
    ids = torch.randint(2, 40, (len(numbers), 12))
    for row, pictures in zip(ids, numbers, strict=True):
        row[1 : 1 + pictures] = PICTURE
    labels = ids.masked_fill(ids == PICTURE, -100)
    return {"input_ids": ids, "pixel_values": torch.randn(sum(numbers), 3, 4, 4), "labels": labels}


parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
args = parser.parse_args()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    # most documents have one picture; from step 8 on some have none, others two
    numbers = [1] * 16 if step < 8 else [2, 2, 1, 2, 1, 1, 0, 0, 2, 1, 2, 0, 0, 1, 1, 0]
    loss = model(**collate(numbers))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 3:
        print(f"step {step} loss {loss.item():.10f}")
torch.save(model.state_dict(), args.out)
