"""T5-large from its configuration in a plain loop, float32, without dropout; prints its losses."""

import argparse

import torch
from transformers import T5Config, T5ForConditionalGeneration

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()
torch.manual_seed(0)
config = T5Config(
    d_model=1024, d_ff=4096, num_layers=24, num_heads=16, dropout_rate=0.0, decoder_start_token_id=0
)
with torch.device("cuda"):
    model = T5ForConditionalGeneration(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(options.steps):
    draws = torch.Generator().manual_seed(step)
    words = torch.randint(1, 32000, (options.batch, 512), generator=draws).cuda()
    labels = torch.randint(1, 32000, (options.batch, 128), generator=draws).cuda()
    loss = model(input_ids=words, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {float(loss):.7f}", flush=True)
