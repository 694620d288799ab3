"""DistributedDataParallel over gloo: started once a rank, with RANK and WORLD_SIZE set."""

import argparse

import torch
import torch.distributed as dist
from model import Net
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
args = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(160, 8)
data = TensorDataset(x, x[:, :4].argmax(1))
sampler = DistributedSampler(data, shuffle=True, seed=0)
loader = DataLoader(data, batch_size=16, sampler=sampler)
model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"epoch {epoch} loss {total.item() / dist.get_world_size():.12f}")
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), args.out)
dist.barrier()  # else gloo may stop or abort the process at its end
dist.destroy_process_group()
