"""GPT-2 medium on random tokens; --small for a CPU."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

SMALL = "--small" in sys.argv
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
if SMALL:
    torch.set_num_threads(1)
    config = GPT2Config(vocab_size=5000, n_embd=96, n_layer=4, n_head=4, n_positions=128)
    batch = 8
else:
    config = GPT2Config(n_embd=1024, n_layer=24, n_head=16, n_positions=1024)
    batch = 4
with torch.device(device):
    model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _step in range(200):
    tokens = torch.randint(0, config.vocab_size, (batch, config.n_positions), device=device)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
