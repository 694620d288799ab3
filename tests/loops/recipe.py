"""What a random training loop consists of: one choice for each of many features.

The first choice of every feature is the plainest. A loop is shrunk by putting features back to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CHOICES: Mapping[str, tuple[Any, ...]] = {
    # the model
    "body": ("linear", "blocks", "tokens", "conv", "attention", "images"),
    "activation": ("tanh", "relu", "gelu"),
    "norm": ("none", "layer", "batch"),
    "dropout": ("none", "zero", "drop"),
    "tied": (False, True),
    "loss": ("mse", "cross", "padded", "sum", "smoothed", "weighted", "custom", "pairwise"),
    "place": ("outside", "inside", "dict", "tuple", "keywords"),
    "state": (
        *("none", "counter", "lazy", "list", "dict", "array", "tensor", "buffer", "global", "last"),
        *("generator", "random_state", "numpy_random", "python_random"),
    ),
    # what may begin in mid-run
    "term": ("none", "sample", "batch", "weights"),
    "term_in": ("model", "loop"),
    "switch": ("always", "counter", "lazy", "buffer", "flag", "global", "argument"),
    "at": (1, 2, 5, 9, 20),
    "freeze": ("none", "start", "freeze", "thaw", "freeze_all", "alternate"),
    "tensor": ("none", "start", "late", "own_step"),
    "late": ("none", "penalty", "hook", "grad", "replay", "head"),
    # hooks
    "hook": (
        *("none", "mean", "list", "array", "closure", "before", "output", "backward", "gradient"),
        "accumulated",
    ),
    "hook_on": ("root", "inner"),
    # the loop
    "roots": ("one", "head", "other", "teacher", "twice", "chained"),
    "accumulate": (1, 2, 3),
    "clip": ("none", "norm", "value", "own"),
    "ema": (False, True),
    "optimizer": (
        *("sgd", "momentum", "adam", "adamw", "rmsprop", "adagrad", "lbfgs", "own", "two"),
        *("amsgrad", "nadam"),
    ),
    "closure": (False, True),
    "groups": (1, 2),
    "zero": ("before", "after", "in_place", "model", "by_hand"),
    "scheduler": ("none", "step", "cosine", "lambda", "plateau"),
    "evaluation": ("none", "eval", "train_mode", "inference"),
    "penalty": ("none", "inputs", "parameters"),
    "data": ("tensors", "loader", "generator", "random_state"),
    "log": ("after", "before", "end"),
    "look": ("none", "norms", "values"),
    "batch": (8, 6, 5),
    "tail": (0, 3),
    "steps": (3, 6, 12, 25),
    "width": (4, 8),
}
"""Every feature and its choices."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One choice for every feature; what is not named is as plain as can be."""

    seed: int = 0
    """Of the weights and the data."""
    changes: tuple[tuple[str, Any], ...] = ()
    """``(feature, choice)``, in the order of ``CHOICES``."""

    @classmethod
    def of(cls, seed: int, choices: Mapping[str, Any]) -> Recipe:
        """Return the recipe with these choices, those that cannot stand together put right."""
        full = {name: choices.get(name, each[0]) for name, each in CHOICES.items()}
        _put_right(full)
        return cls(seed, tuple((n, full[n]) for n in CHOICES if full[n] != CHOICES[n][0]))

    def __getitem__(self, name: str) -> Any:
        return dict(self.changes).get(name, CHOICES[name][0])

    def without(self, name: str) -> Recipe:
        """Return this recipe with one feature put back."""
        return self.of(self.seed, {n: choice for n, choice in self.changes if n != name})

    @property
    def draws(self) -> bool:
        """Whether the model draws random numbers in its forward pass."""
        drawing = ("generator", "random_state", "numpy_random", "python_random")
        return self["dropout"] == "drop" or self["state"] in drawing

    def __str__(self) -> str:
        named = (f"{name}={choice}" for name, choice in self.changes)
        return ", ".join((f"seed {self.seed}", *named))


def _put_right(full: dict[str, Any]) -> None:
    """Change what a loop could not be written with, or would fail of in plain Python."""
    full["steps"] = max(full["steps"], full["at"] + 2 if full["at"] > 1 else 0)
    if full["loss"] == "padded":
        full["body"] = "tokens"
        if full["norm"] == "batch":
            full["norm"] = "none"
        if full["roots"] in ("twice", "teacher"):
            full["roots"] = "one"
    if full["tied"]:
        full |= {"body": "tokens", "loss": "padded"}
        full["norm"] = "layer" if full["norm"] != "none" else "none"
    if full["roots"] in ("head", "twice", "chained", "teacher"):  # they look at the output
        full["place"] = "outside" if full["place"] == "inside" else full["place"]
    if full["roots"] == "head":
        full |= {"place": "outside", "term_in": "loop", "tied": False}
    if full["roots"] == "chained" and full["body"] != "linear":
        full["roots"] = "one"
    if full["place"] == "inside" and full["penalty"] == "inputs":
        full["place"] = "dict"
    if full["body"] == "tokens" and full["penalty"] == "inputs":
        full["penalty"] = "none"  # there is no slope in whole numbers
    if full["optimizer"] == "lbfgs":
        full |= {"closure": True, "groups": 1, "accumulate": 1}
        full["tensor"] = "none" if full["tensor"] in ("late", "start") else full["tensor"]
        full["scheduler"] = "none"
    if full["optimizer"] == "own":
        full |= {"closure": False, "groups": 1, "scheduler": "none"}
        full["zero"] = "by_hand" if full["zero"] != "model" else "model"
    if full["closure"]:
        full["accumulate"] = 1
        if full["optimizer"] == "two":
            full["optimizer"] = "sgd"
    if full["freeze"] == "freeze_all" and (full["clip"] == "value" or full["roots"] == "head"):
        full["freeze"] = "freeze"  # torch clips no empty list
    if full["freeze"] != "none" and full["penalty"] == "parameters":
        full["penalty"] = "none"
    if full["hook"] == "backward" and full["place"] in ("dict", "tuple"):
        full["hook_on"] = "inner"
    if full["norm"] == "batch" and full["tail"]:
        full["tail"] = 3
    if full["late"] in ("penalty", "hook") and full[full["late"]] == "none":
        full["late"] = "none"  # there is nothing that could begin late
    if full["late"] in ("grad", "replay", "head"):
        full["roots"] = "one"
        if full["optimizer"] in ("lbfgs", "own", "two") or full["closure"] or full["tied"]:
            full["late"] = "none"
    if full["late"] == "head":
        full["scheduler"] = "none"  # torch's have a rate for each group that was there at first
    if full["term"] == "none":
        full["switch"] = "always"
        full["term_in"] = "model"
    if full["term_in"] == "loop" and full["switch"] in ("counter", "lazy", "buffer", "argument"):
        full["switch"] = "flag"
