"""The Trainer of transformers: a small BERT with random weights, no network."""

import argparse
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
parser.add_argument("--batch-size", type=int, default=16)
args = parser.parse_args()

torch.manual_seed(0)
config = BertConfig(
    vocab_size=60,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=32,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    num_labels=3,
)
model = BertForSequenceClassification(config).double()
rows = torch.randint(1, 60, (10 * args.batch_size, 12))
data = [{"input_ids": row, "labels": int(row[0] % 3)} for row in rows]

with tempfile.TemporaryDirectory() as folder:
    settings = TrainingArguments(
        output_dir=folder,
        max_steps=20,
        per_device_train_batch_size=args.batch_size,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=4,
        max_grad_norm=1.0,
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=10,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=settings, train_dataset=data, eval_dataset=data[:40])
    trainer.train()
    print(f"{trainer.state.global_step} steps, scheduler {trainer.lr_scheduler.last_epoch}")
torch.save(model.state_dict(), args.out)
