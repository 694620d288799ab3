"""GPT-2 medium from its configuration under DDP, without dropout; rank 0 prints its losses."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
torch.manual_seed(0)
config = GPT2Config(
    n_layer=24, n_embd=1024, n_head=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
)
with torch.device("cuda"):
    model = DistributedDataParallel(GPT2LMHeadModel(config).train(), device_ids=[rank])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(options.steps):
    draws = torch.Generator().manual_seed(2 * step + rank)
    words = torch.randint(50257, (options.batch, 1024), generator=draws).cuda()
    loss = model(input_ids=words, labels=words).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"loss {float(loss):.7f}", flush=True)
dist.destroy_process_group()
