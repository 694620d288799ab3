"""CTC with lengths; a step is skipped where the gradient's norm is not finite.

Source: https://github.com/espnet/espnet/pull/3283
"""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
parser.add_argument("--accum-grad", type=int, default=4)
args = parser.parse_args()

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.net = nn.Sequential(
            nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        return x + self.net(self.norm(x))


class Recognizer(nn.Module):
    def __init__(self, features=8, width=16, letters=6, depth=4):
        super().__init__()
        self.first = nn.Linear(features, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, letters)
        self.ctc = nn.CTCLoss(reduction="sum")

    def forward(self, speech, speech_lengths, text, text_lengths):
        x = self.first(speech)
        for block in self.blocks:
            x = block(x)
        scores = self.head(x).log_softmax(-1).transpose(0, 1)
        loss = self.ctc(scores, text, speech_lengths, text_lengths) / len(speech)
        return loss, {"loss": loss.detach()}, len(speech)


model = Recognizer()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
skipped = 0
for iteration in range(1, 81):
    speech, text = torch.randn(16, 12, 8), torch.randint(1, 6, (16, 4))
    speech_lengths, text_lengths = torch.randint(8, 13, (16,)), torch.randint(2, 5, (16,))
    if iteration % 19 == 1:
        speech_lengths[5] = 1  # one recording is too short for its text: an infinite loss
    loss, stats, weight = model(speech, speech_lengths, text, text_lengths)
    (loss / args.accum_grad).backward()
    if iteration % args.accum_grad:
        continue
    norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    if torch.isfinite(norm):
        optimizer.step()
    else:
        skipped += 1
    optimizer.zero_grad()
    if iteration % 16 == 0:
        print(f"iteration {iteration} loss {stats['loss'].item():.12f} skipped {skipped}")
torch.save(model.state_dict(), args.out)
