"""T5-large from its configuration in a plain loop, float32, without dropout; prints its losses."""

import argparse

import torch
from by_hand import adamw, add_flags, autocast, prepare
from transformers import T5Config, T5ForConditionalGeneration

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cuda")
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--steps", type=int, default=20)
add_flags(parser)
options = parser.parse_args()
torch.manual_seed(0)
config = T5Config(
    d_model=1024, d_ff=4096, num_layers=24, num_heads=16, dropout_rate=0.0, decoder_start_token_id=0
)
with torch.device(options.device):
    model = T5ForConditionalGeneration(config).train()
prepare(model, [*model.encoder.block, *model.decoder.block], options)
optimizer = adamw(model.parameters(), options, lr=1e-4, weight_decay=0.01)
precision = autocast(options)
for step in range(options.steps):
    draws = torch.Generator().manual_seed(step)
    words = torch.randint(1, 32000, (options.batch, 512), generator=draws).to(options.device)
    labels = torch.randint(1, 32000, (options.batch, 128), generator=draws).to(options.device)
    optimizer.zero_grad()
    total = torch.zeros((), device=options.device)
    size = options.micro_batch or len(words)
    for part, targets in zip(words.split(size), labels.split(size), strict=True):
        with precision:
            loss = model(input_ids=part, labels=targets).loss * (len(part) / len(words))
        loss.backward()
        total += loss.detach()
    optimizer.step()
    print(f"loss {total.item():.7f}", flush=True)
