"""Prefix tuning: what trains reaches the model as a cache that its layers extend.

Source: https://github.com/huggingface/peft/issues/869
"""

import argparse

import torch
from peft import PrefixTuningConfig, TaskType, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
args = parser.parse_args()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=2,
)
base = LlamaForCausalLM(config)
model = get_peft_model(base, PrefixTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=6))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-1)
texts = torch.randint(1, 64, (64, 10))
model.train()
for step in range(20):
    ids = texts[torch.randint(64, (16,))]
    loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 3:
        print(f"step {step} loss {loss.item():.10f}")
torch.save({name: p.detach() for name, p in model.named_parameters() if p.requires_grad}, args.out)
