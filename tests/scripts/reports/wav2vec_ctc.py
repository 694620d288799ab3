"""Wav2Vec2 with CTC: NumPy draws masks for each sample, layers are dropped at random.

Source: https://github.com/huggingface/transformers/issues/10459
"""

import argparse

import numpy as np
import torch
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
args = parser.parse_args()
torch.manual_seed(0)
np.random.seed(0)
config = Wav2Vec2Config(
    vocab_size=12,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=64,
    conv_dim=(16, 16),
    conv_stride=(5, 4),
    conv_kernel=(10, 4),
    num_feat_extract_layers=2,
    num_conv_pos_embeddings=8,
    num_conv_pos_embedding_groups=2,
    feat_extract_norm="layer",
    do_stable_layer_norm=True,
    mask_time_prob=0.2,
    mask_time_length=4,
    layerdrop=0.1,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    activation_dropout=0.0,
    feat_proj_dropout=0.0,
    final_dropout=0.0,
    ctc_loss_reduction="mean",
    pad_token_id=0,
)
model = Wav2Vec2ForCTC(config)
model.freeze_feature_encoder()
model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
sounds, lengths = torch.randn(64, 800), torch.randint(500, 801, (64,))
texts = torch.randint(1, 12, (64, 6))
texts[torch.arange(6) >= torch.randint(3, 7, (64, 1))] = -100
for step in range(20):
    rows = torch.randint(64, (16,))
    mask = (torch.arange(800) < lengths[rows, None]).long()
    loss = model(input_values=sounds[rows] * mask, attention_mask=mask, labels=texts[rows]).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 3:
        print(f"step {step} loss {loss.item():.9f}")
torch.save(model.state_dict(), args.out)
