"""DPO with LoRA: the same model without its adapter runs before the backward.

Source: https://github.com/huggingface/peft/pull/2860
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
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
model = get_peft_model(
    LlamaForCausalLM(config),
    LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def log_probabilities(ids, mask):
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    labels, counts = ids[:, 1:], mask[:, 1:].clone()
    counts[:, :3] = 0  # the prompt
    each = logits.log_softmax(-1).gather(2, labels.unsqueeze(2)).squeeze(2)
    return (each * counts).sum(-1)


for step in range(20):
    prompt = torch.randint(1, 64, (8, 4))
    chosen, rejected = torch.randint(1, 64, (8, 8)), torch.randint(1, 64, (8, 8))
    ids = torch.cat([torch.cat([prompt, chosen], 1), torch.cat([prompt, rejected], 1)])
    mask = (torch.arange(12) < torch.randint(7, 13, (16, 1))).long()
    policy = log_probabilities(ids, mask)
    with torch.no_grad(), model.disable_adapter():
        reference = log_probabilities(ids, mask)
    ratio = policy - reference
    loss = -F.logsigmoid(0.5 * (ratio[:8] - ratio[8:])).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 3:
        print(f"step {step} loss {loss.item():.10f} reward {ratio.mean().item():.9f}")
torch.save({k: v for k, v in model.state_dict().items() if "lora" in k}, args.out)
