"""A ResNet of 152 or 50 layers from its configuration, float32: pictures of 224 x 224.

Under torchrun it is distributed by hand, with synchronised BatchNorm.
"""

import argparse
import os

import torch
import torch.distributed as dist
from by_hand import adamw, add_flags, autocast, prepare
from torch.nn import SyncBatchNorm, functional
from torch.nn.parallel import DistributedDataParallel
from transformers import ResNetConfig, ResNetForImageClassification

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cuda")
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--depth", type=int, choices=[50, 152], default=152)
parser.add_argument("--log-every", type=int, default=10)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--channels-last", action="store_true")
add_flags(parser)
options = parser.parse_args()
rank = int(os.environ.get("RANK", 0))
batch = options.batch // int(os.environ.get("WORLD_SIZE", 1))
if dist.is_torchelastic_launched():
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
torch.manual_seed(0)
depths = [3, 8, 36, 3] if options.depth == 152 else [3, 4, 6, 3]
config = ResNetConfig(depths=depths, num_labels=1000)
model = ResNetForImageClassification(config).train().to(options.device)
if options.channels_last:
    model = model.to(memory_format=torch.channels_last)
prepare(model, [layer for stage in model.resnet.encoder.stages for layer in stage.layers], options)
if dist.is_initialized():
    model = DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(model), [rank])
optimizer = adamw(model.parameters(), options, lr=1e-3, weight_decay=0.05)
precision = autocast(options)
for step in range(options.steps):
    draws = torch.Generator(options.device).manual_seed(step + 1000 * rank)
    kinds = {"device": options.device, "generator": draws}
    pictures = torch.randn(batch, 3, 224, 224, **kinds)
    labels = torch.randint(1000, (batch,), **kinds)
    if options.channels_last:
        pictures = pictures.to(memory_format=torch.channels_last)
    with precision:
        loss = functional.cross_entropy(model(pictures).logits.float(), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and step % options.log_every == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
