"""ViT-L/16 on random images; --small for a CPU."""

import sys

import torch
from transformers import ViTConfig, ViTForImageClassification

SMALL = "--small" in sys.argv
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
if SMALL:
    torch.set_num_threads(1)
    sizes = dict(hidden_size=96, num_hidden_layers=6, num_attention_heads=3, intermediate_size=384)
    config, batch = ViTConfig(**sizes, image_size=64, patch_size=8, num_labels=10), 8
else:
    sizes = dict(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    config, batch = ViTConfig(**sizes, num_labels=1000), 64
with torch.device(device):
    model = ViTForImageClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _step in range(200):
    images = torch.randn(batch, 3, config.image_size, config.image_size, device=device)
    labels = torch.randint(0, config.num_labels, (batch,), device=device)
    loss = torch.nn.functional.cross_entropy(model(images).logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
