"""GPT-2 XL, 1.56 B parameters, from its configuration in a plain loop, float32: 8 x 1024 tokens."""

import argparse

import torch
from by_hand import adamw, add_flags, autocast, prepare
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cuda")
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--steps", type=int, default=1000)
add_flags(parser)
options = parser.parse_args()
torch.manual_seed(0)
config = GPT2Config(
    n_layer=48, n_embd=1600, n_head=25, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
)
with torch.device(options.device):
    model = GPT2LMHeadModel(config).train()
prepare(model, model.transformer.h, options)
optimizer = adamw(model.parameters(), options, lr=1e-4, weight_decay=0.1)
precision = autocast(options)
for step in range(options.steps):
    draws = torch.Generator().manual_seed(step)
    words = torch.randint(50257, (options.batch, 1024), generator=draws).to(options.device)
    optimizer.zero_grad()
    total = torch.zeros((), device=options.device)
    for part in words.split(options.micro_batch or len(words)):
        with precision:
            loss = model(input_ids=part, labels=part, use_cache=False).loss
        loss = loss * (len(part) / len(words))
        loss.backward()
        total += loss.detach()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {total.item():.7f}", flush=True)
