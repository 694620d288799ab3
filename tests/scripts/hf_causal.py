"""A causal language model of transformers in a plain loop, its cache left on by default."""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
parser.add_argument("--batch-size", type=int, default=16)
args = parser.parse_args()

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=40,
    n_positions=16,
    n_embd=16,
    n_layer=3,
    n_head=2,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)
model = GPT2LMHeadModel(config).double().train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(1, 21):
    tokens = torch.randint(40, (args.batch_size, 12)).cumsum(1) % 40
    lengths = torch.randint(4, 13, (args.batch_size, 1))
    labels = tokens.masked_fill(torch.arange(12) >= lengths, -100)
    output = model(input_ids=tokens, labels=labels)
    output.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0:
        print(f"step {step} loss {output.loss.item():.12f}")
torch.save(model.state_dict(), args.out)
