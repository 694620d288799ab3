"""GPT-2 medium from its configuration, with the Trainer and its default dropout: 16 x 1024.

Under torchrun the Trainer distributes it.
"""

import argparse
import os
import time

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--profile", help="write a trace of steps 21 to 23 to this file")
parser.add_argument("--bf16", action="store_true")
options = parser.parse_args()


class Words(Dataset):
    """Random words, which are their own labels."""

    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        words = torch.randint(50257, (1024,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


class Clock(TrainerCallback):
    """Prints the speed of the steps after the first ten."""

    def on_step_end(self, args, state, control, **kwargs):
        if options.profile and state.global_step == 20:
            self.profile = torch.profiler.profile()
            self.profile.start()
        if options.profile and state.global_step == 23:
            torch.cuda.synchronize()
            self.profile.stop()
            self.profile.export_chrome_trace(options.profile)
        if state.global_step == 10:
            torch.cuda.synchronize()
            self.start = time.perf_counter()
        if state.global_step == options.steps and state.is_world_process_zero:
            torch.cuda.synchronize()
            seconds = time.perf_counter() - self.start
            print(f"speed {16 * (options.steps - 10) / seconds:.1f} samples/s", flush=True)
            print(f"cards {torch.cuda.device_count()}", flush=True)


torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=24, n_embd=1024, n_head=16))
arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=16 // int(os.environ.get("WORLD_SIZE", 1)),
    bf16=options.bf16,
    max_steps=options.steps,
    save_strategy="no",
    report_to=[],
    logging_steps=20,
)
Trainer(model=model, args=arguments, train_dataset=Words(), callbacks=[Clock()]).train()
