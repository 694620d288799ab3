"""Train BERT to sort made-up sentences by topic, with the Trainer of Hugging Face transformers.

Nothing is downloaded: the weights are random, and the sentences are lists of token numbers of
varied lengths, which a collator pads. The preset `bert-large` has 32 sentences of 512 tokens in a
forward pass. DistilBERT and BigBird are made from their configs in the same way.

    python examples/text_classifier_trainer.py --preset tiny --steps 40
"""

import argparse
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _by_hand import add_flags
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    EvalPrediction,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

PADDING = 0
START = 1
FIRST_WORD = 2
TOPICS = 4
DROPOUTS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "classifier_dropout",
    # DistilBERT's config has names of its own.
    "dropout",
    "attention_dropout",
    "seq_classif_dropout",
)


@dataclass(frozen=True)
class Preset:
    """The sizes of a model and of its sentences; lengths and `vocabulary` are in tokens.

    `model` is the name that transformers has for the family.
    """

    width: int
    layers: int
    heads: int
    vocabulary: int
    shortest: int
    longest: int
    batch_size: int
    learning_rate: float
    model: str = "bert"


PRESETS = {
    "tiny": Preset(64, 2, 2, 512, 12, 48, 16, 2e-3),
    "small": Preset(256, 4, 4, 8192, 32, 128, 32, 5e-4),
    "bert-base": Preset(768, 12, 12, 30522, 64, 512, 32, 1e-4),
    "bert-large": Preset(1024, 24, 16, 30522, 512, 512, 32, 5e-5),
    "distilbert": Preset(768, 6, 12, 30522, 64, 512, 32, 1e-4, "distilbert"),
    "bigbird": Preset(768, 12, 12, 50358, 2048, 4096, 4, 5e-5, "big_bird"),
}


def write_sentences(count: int, preset: Preset, seed: int) -> list[dict[str, Any]]:
    """Return sentences as `input_ids` with their topic as `labels`.

    Half the words of a sentence come from the whole vocabulary, half from a few words that belong
    to its topic.
    """
    draw = random.Random(seed)
    sentences = []
    for _ in range(count):
        topic = draw.randrange(TOPICS)
        length = draw.randint(preset.shortest, preset.longest)
        favourite = FIRST_WORD + 8 * topic
        words = [
            draw.randrange(FIRST_WORD, preset.vocabulary)
            if draw.random() < 0.5
            else draw.randrange(favourite, favourite + 8)
            for _ in range(length - 1)
        ]
        sentences.append({"input_ids": [START, *words], "labels": topic})
    return sentences


def pad(sentences: Sequence[dict[str, Any]], length: int = 0) -> dict[str, Tensor]:
    """Make a batch, every sentence as long as the longest or `length`: ids are (batch, tokens)."""
    longest = max(length, *(len(sentence["input_ids"]) for sentence in sentences))
    ids = torch.full((len(sentences), longest), PADDING)
    for row, sentence in zip(ids, sentences, strict=True):
        row[: len(sentence["input_ids"])] = torch.tensor(sentence["input_ids"])
    return {
        "input_ids": ids,
        "attention_mask": (ids != PADDING).long(),
        "labels": torch.tensor([sentence["labels"] for sentence in sentences]),
    }


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of the sentences whose topic is guessed right."""
    guesses = np.asarray(prediction.predictions).argmax(axis=-1)
    return {"accuracy": float(np.mean(guesses == prediction.label_ids))}


class Losses(TrainerCallback):
    """Prints each loss the Trainer logs in full, and writes it to a file when there is one.

    A loss is the mean since the last line. Transformers before 5 rounds it to four digits.
    """

    def __init__(self, file: Path | None) -> None:
        self.file = file
        if file is not None:
            file.write_text("")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Report one loss; the Trainer also logs evaluations and a summary, which have none."""
        if logs is None or "loss" not in logs:
            return
        loss = float(logs["loss"])
        print(f"step {state.global_step} loss {loss!r}", flush=True)
        if self.file is not None:
            with self.file.open("a") as lines:
                print(repr(loss), file=lines)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train BERT with the Hugging Face Trainer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default_device)
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="size of the model")
    families = ("bert", "distilbert", "big_bird")
    parser.add_argument("--model", choices=families, help="family, or the preset's")
    parser.add_argument("--seed", type=int, default=0, help="of sentences, weights and order")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=-1, help="optimizer steps; -1: by --epochs")
    parser.add_argument("--batch-size", type=int, help="sentences a forward pass, or the preset's")
    parser.add_argument("--accumulation", type=int, default=1, help="forward passes a step")
    parser.add_argument("--sentences", type=int, default=1024, help="to train on")
    parser.add_argument("--shortest", type=int, help="tokens of a sentence, or the preset's")
    parser.add_argument("--pad-to-longest", action="store_true", help="of all, not of the batch")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--log-every", type=int, default=10, help="steps between lines")
    parser.add_argument("--losses", type=Path, help="write the loss of every step to this file")
    parser.add_argument("--output-dir", type=Path, help="where the Trainer writes, if not /tmp")
    add_flags(parser)
    return parser.parse_args()


def build_model(preset: Preset, dropout: float) -> PreTrainedModel:
    """Return a model of that family and size with random weights."""
    config = AutoConfig.for_model(
        preset.model,
        vocab_size=preset.vocabulary,
        hidden_size=preset.width,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        intermediate_size=4 * preset.width,
        hidden_dim=4 * preset.width,  # its name in DistilBERT's config
        max_position_embeddings=preset.longest,
        pad_token_id=PADDING,
        num_labels=TOPICS,
        **dict.fromkeys(DROPOUTS, dropout),
    )
    model: PreTrainedModel
    model = AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]
    return model


def by_hand(arguments: argparse.Namespace, batch_size: int) -> dict[str, Any]:
    """Return the flags of `_by_hand` as the Trainer's own arguments."""
    passes = batch_size // arguments.micro_batch if arguments.micro_batch else 1
    optimizers = {"fused": {"optim": "adamw_torch_fused"}, "8bit": {"optim": "adamw_bnb_8bit"}}
    return {
        **optimizers.get(arguments.optimizer, {}),
        "per_device_train_batch_size": arguments.micro_batch or batch_size,
        "gradient_accumulation_steps": passes * arguments.accumulation,
        "bf16": arguments.precision == "bf16",
        "tf32": arguments.precision == "tf32" or None,
        "gradient_checkpointing": arguments.checkpointing,
        "torch_compile": arguments.compile == "full",
    }


def train(arguments: argparse.Namespace, output_dir: Path) -> None:
    """Train, evaluate once, and end with the mean loss and the samples per second."""
    preset = PRESETS[arguments.preset]
    preset = replace(
        preset,
        shortest=arguments.shortest or preset.shortest,
        model=arguments.model or preset.model,
    )
    batch_size = arguments.batch_size or preset.batch_size
    held_out = max(1, arguments.sentences // 8)
    set_seed(arguments.seed)
    trainer = Trainer(
        model=build_model(preset, arguments.dropout),
        args=TrainingArguments(
            output_dir=str(output_dir),
            use_cpu=arguments.device == "cpu",
            seed=arguments.seed,
            num_train_epochs=arguments.epochs,
            max_steps=arguments.steps,
            **by_hand(arguments, batch_size),
            per_device_eval_batch_size=batch_size,
            learning_rate=preset.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=5,
            logging_steps=1 if arguments.losses else arguments.log_every,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        data_collator=partial(pad, length=preset.longest if arguments.pad_to_longest else 0),
        train_dataset=write_sentences(arguments.sentences, preset, arguments.seed),
        eval_dataset=write_sentences(held_out, preset, arguments.seed + 1),
        compute_metrics=accuracy,
        callbacks=[Losses(arguments.losses)],
    )
    # The forward takes any keyword, so the Trainer believes that its loss is divided by the size
    # of the accumulated batch. It is not: left alone, the gradient would be K times as large.
    trainer.model_accepts_loss_kwargs = False
    trainer.remove_callback(PrinterCallback)  # `Losses` says the same in full
    result = trainer.train()
    evaluation = trainer.evaluate()
    samples_per_second = result.metrics["train_samples_per_second"]
    print(f"mean loss of the training {result.training_loss!r}")
    print(f"accuracy {evaluation['eval_accuracy']:.4f}")
    print(f"done: {samples_per_second:.2f} samples/s")


def main() -> None:
    """Run with the given output directory, or with one that is thrown away afterwards."""
    arguments = parse_arguments()
    if arguments.output_dir is not None:
        train(arguments, arguments.output_dir)
        return
    with tempfile.TemporaryDirectory() as scratch:
        train(arguments, Path(scratch))


if __name__ == "__main__":
    main()
