"""An LSTM whose state is carried from one step to the next, cut off from its past."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
args = parser.parse_args()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 20)

    def forward(self, words, state=None):
        x, state = self.lstm(self.words(words), state)
        return self.head(x), state


torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
text = torch.randint(20, (16, 201)).cumsum(1) % 20
model = Recurrent()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
state = None
for step in range(1, 21):
    words = text[:, 10 * (step - 1) : 10 * step + 1]
    logits, state = model(words[:, :-1], state)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    state = tuple(each.detach() for each in state)
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.12f}")
torch.save(model.state_dict(), args.out)
