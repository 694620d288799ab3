"""The batch is the second dimension: torch's own Transformer layers as they come."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
parser.add_argument("--batch-size", type=int, default=16)
args = parser.parse_args()


class Sequences(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, nhead=2, dim_feedforward=32, dropout=0.0)
        self.words = nn.Embedding(20, width)
        self.encoder = nn.TransformerEncoder(layer, num_layers=3, enable_nested_tensor=False)
        self.head = nn.Linear(width, 20)

    def forward(self, words):
        mask = nn.Transformer.generate_square_subsequent_mask(len(words))
        return self.head(self.encoder(self.words(words), mask=mask, is_causal=True))


torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = Sequences()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(1, 21):
    words = torch.randint(20, (10, args.batch_size)).cumsum(0) % 20
    logits = model(words[:-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), words[1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.12f}")
torch.save(model.state_dict(), args.out)
