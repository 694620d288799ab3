"""Make up the data that the public scripts of ``compatibility.toml`` train on.

    python benchmarks/public_data.py FOLDER

``FOLDER`` holds checkouts of the repositories the list names, each under its own name: ``nanoGPT``,
``minGPT``, ``makemore`` and ``ng-video-lecture`` (karpathy), ``examples`` (pytorch), ``accelerate``
(huggingface), ``lightning`` (Lightning-AI/pytorch-lightning). Beside what autofit needs, the
scripts import matplotlib, tensorboard, gymnasium, datasets and evaluate.

Nothing is downloaded: words are drawn from a small vocabulary with a fixed seed, the BERT has
random weights, and every script finds its data where it looks for it.
"""

from __future__ import annotations

import argparse
import csv
import random
import subprocess
import sys
from pathlib import Path

WORDS = [
    first + second + third
    for first in ("b", "d", "k", "l", "m", "r", "s", "t")
    for second in ("a", "e", "i", "o")
    for third in ("n", "r", "s", "")
]
"""128 short words."""

GLUE = """---
configs:
- config_name: mrpc
  data_files:
  - {split: train, path: train.csv}
  - {split: validation, path: validation.csv}
  - {split: test, path: test.csv}
---
Made-up sentence pairs.
"""

METRIC = '''"""Share of right answers, in the place of the GLUE metric."""

import datasets
import evaluate


class Accuracy(evaluate.Metric):
    """Compares labels."""

    def _info(self):
        features = {name: datasets.Value("int64") for name in ("predictions", "references")}
        return evaluate.MetricInfo(
            description="accuracy",
            citation="",
            features=datasets.Features(features),
        )

    def _compute(self, predictions, references):
        right = sum(a == b for a, b in zip(predictions, references, strict=True))
        return {"accuracy": right / len(references)}
'''


def main() -> None:
    """Write the data of every script."""
    parser = argparse.ArgumentParser(description="Make up the data of the public scripts.")
    parser.add_argument("public", type=Path, metavar="FOLDER")
    public = parser.parse_args().public.resolve()
    draw = random.Random(0)
    nano_gpt(public / "nanoGPT", draw)
    prompt = "O God, O God!\n"  # what the example lets its model go on from
    (public / "minGPT" / "input.txt").write_text(prompt + text(draw, 4000))
    wikitext(public / "wikitext", draw)
    sine_waves(public / "examples" / "time_sequence_prediction")
    for folder in ("pytorch/basics", "fabric/language_model"):
        data = public / "lightning" / "examples" / folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        (data / "wikitext-2.txt").write_text(text(draw, 25_000))
    sentence_pairs(public / "nlp", draw)
    small_bert(public / "nlp" / "bert-base-cased")


def text(draw: random.Random, lines: int) -> str:
    """Return lines of up to a dozen words, one a sentence."""
    return "".join(
        f"{' '.join(draw.choices(WORDS, k=draw.randint(4, 12)))} .\n" for _ in range(lines)
    )


def nano_gpt(folder: Path, draw: random.Random) -> None:
    """Put a made-up text where Shakespeare is expected, and prepare it with its own script."""
    data = folder / "data" / "shakespeare_char"
    (data / "input.txt").write_text(text(draw, 4000))
    subprocess.run([sys.executable, "prepare.py"], cwd=data, check=True)


def wikitext(folder: Path, draw: random.Random) -> None:
    """Write the three parts that ``word_language_model`` reads."""
    folder.mkdir(exist_ok=True)
    for name, lines in (("train", 3000), ("valid", 100), ("test", 100)):
        (folder / f"{name}.txt").write_text(text(draw, lines))


def sine_waves(folder: Path) -> None:
    """Let the example make its own data."""
    subprocess.run([sys.executable, "generate_sine_wave.py"], cwd=folder, check=True)


def sentence_pairs(folder: Path, draw: random.Random) -> None:
    """Write pairs under the names that ``load_dataset`` and ``evaluate.load`` look for."""
    data = folder / "nyu-mll" / "glue"
    data.mkdir(parents=True, exist_ok=True)
    (data / "README.md").write_text(GLUE)
    for split, rows in (("train", 640), ("validation", 64), ("test", 64)):
        with (data / f"{split}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["sentence1", "sentence2", "label", "idx"])
            for index in range(rows):
                first = draw.choices(WORDS, k=draw.randint(6, 24))
                label = draw.randint(0, 1)
                second = draw.sample(first, k=len(first)) if label else draw.choices(WORDS, k=12)
                writer.writerow([" ".join(first), " ".join(second), label, index])
    metric = folder / "glue"
    metric.mkdir(exist_ok=True)
    (metric / "glue.py").write_text(METRIC)


def small_bert(folder: Path) -> None:
    """Save a BERT of four layers with random weights, and a tokenizer of whole words."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    folder.mkdir(exist_ok=True)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join([*special, *WORDS, "."]) + "\n")
    tokenizer = BertTokenizer(vocab=str(vocabulary), do_lower_case=False)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(special) + len(WORDS) + 1,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=128,
    )
    BertForSequenceClassification(config).save_pretrained(folder)


if __name__ == "__main__":
    main()
