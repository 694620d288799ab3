"""Writes a recipe out as a training script, as a user might have it."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import indent

from tests.loops.recipe import Recipe

HEAD = """\
import copy
import random

import numpy
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed({seed})
random.seed({seed})
numpy.random.seed({seed})
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
AT, STEPS, BATCH = {at}, {steps}, {batch}
SWITCH = False
CALLS = 0
KEPT = {{"mean": torch.zeros(()), "count": 0, "list": [], "array": numpy.zeros(2)}}
GENERATOR = torch.Generator().manual_seed(1)
STATE = numpy.random.RandomState(1)
LOSSES, SEEN = [], []
"""
TAIL = """\
def told(value):
    if isinstance(value, torch.Tensor):
        return value.detach().double().flatten().tolist()
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        return numpy.asarray(value, dtype=float).flatten().tolist()
    if isinstance(value, dict):
        return {str(name): told(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [told(each) for each in value]
    return value


RESULT = {
    "losses": [float(each) for each in LOSSES],
    "seen": told(SEEN),
    "parameters": {name: told(p) for name, p in EVERYTHING.named_parameters()},
    "buffers": {name: told(b) for name, b in EVERYTHING.named_buffers()},
    "tensors": told(TENSORS),
    "frozen": [not p.requires_grad for p in EVERYTHING.parameters()],
    "attributes": told({name: getattr(net, name, None) for name in NAMES}),
    "globals": told([SWITCH, CALLS]),
    "hooks": told(KEPT),
    "own generators": told([GENERATOR.get_state(), STATE.get_state()[1:3]]),
    "generators": told([torch.get_rng_state(), numpy.random.get_state()[1:3], random.getstate()]),
}
if __name__ == "__main__":
    print({name: RESULT[name] for name in ("losses", "parameters", "attributes", "hooks")})
"""
ACTIVATIONS = {"tanh": "torch.tanh", "relu": "torch.relu", "gelu": "F.gelu"}
SHAPES = {
    "linear": "torch.randn(COUNT, 6)",
    "blocks": "torch.randn(COUNT, 6)",
    "tokens": "torch.randint(0, 11, (COUNT, 5))",
    "conv": "torch.randn(COUNT, 3, 8)",
    "attention": "torch.randn(COUNT, 4, 6)",
    "images": "torch.randn(COUNT, 3, 4, 4)",
}
LOSSES = {
    "mse": "F.mse_loss(out, y)",
    "cross": "F.cross_entropy(out, y)",
    "padded": "F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=-100)",
    "sum": 'F.mse_loss(out, y, reduction="sum") / 10',
    "smoothed": "F.cross_entropy(out, y, label_smoothing=0.1)",
    "weighted": "((1 + y[:, 0].abs()) * (out - y).square().mean(-1)).sum()"
    " / (1 + y[:, 0].abs()).sum()",
    "custom": "((out - y).abs() + 1e-3).pow(1.5).mean()",
    "pairwise": "(out @ out.T - y @ y.T).square().mean()",
}
STATES = {
    "none": "",
    "counter": "self.seen += 1",
    "lazy": 'self.z = getattr(self, "z", 0) + 1',
    "list": "self.norms.append(float(h.detach().norm()))",
    "dict": 'self.table["calls"] = self.table.get("calls", 0) + 1',
    "array": "self.array += h.detach().mean().item()",
    "tensor": "self.running = 0.9 * self.running + 0.1 * h.detach().mean()",
    "buffer": "self.mean.mul_(0.9).add_(0.1 * h.detach().mean())",
    "global": "global CALLS\nCALLS += 1",
    "last": "self.last = h.detach().clone()",
    "generator": "h = h + 0.1 * torch.randn(h.shape, generator=GENERATOR)",
    "random_state": "h = h + 0.1 * torch.as_tensor(STATE.randn(*h.shape))",
    "numpy_random": "h = h * (1 + 0.1 * numpy.random.random())",
    "python_random": "h = h * (1 + 0.1 * random.random())",
}
OPTIMIZERS = {
    "sgd": "torch.optim.SGD({}, lr=0.05)",
    "momentum": "torch.optim.SGD({}, lr=0.05, momentum=0.9, nesterov=True)",
    "adam": "torch.optim.Adam({}, lr=0.01)",
    "amsgrad": "torch.optim.Adam({}, lr=0.01, amsgrad=True)",
    "adamw": "torch.optim.AdamW({}, lr=0.01, weight_decay=0.1)",
    "nadam": "torch.optim.NAdam({}, lr=0.01)",
    "rmsprop": "torch.optim.RMSprop({}, lr=0.005)",
    "adagrad": "torch.optim.Adagrad({}, lr=0.05)",
    "lbfgs": "torch.optim.LBFGS({}, lr=0.1, max_iter=3)",
}
SCHEDULERS = {
    "step": "torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)",
    "cosine": "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)",
    "lambda": "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: 1 / (1 + e))",
    "plateau": "torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)",
}
HOOKS = {
    "mean": (
        "def hook(module, args, output):\n"
        '    KEPT["count"] += 1\n'
        '    KEPT["mean"] += (first(output).detach().mean() - KEPT["mean"]) / KEPT["count"]'
    ),
    "list": (
        "def hook(module, args, output):\n"
        '    KEPT["list"].append(float(first(output).detach().square().mean()))'
    ),
    "array": (
        "def hook(module, args, output):\n"
        '    KEPT["array"] += [first(output).detach().mean().item(), 1]'
    ),
    "closure": (
        "def counting():\n"
        "    count = 0\n\n"
        "    def hook(module, args, output):\n"
        "        nonlocal count\n"
        "        count += 1\n"
        '        KEPT["count"] = count\n\n'
        "    return hook\n\n\n"
        "hook = counting()"
    ),
    "before": 'def hook(module, args):\n    KEPT["count"] += 1',
    "output": (
        "def hook(module, args, output):\n"
        '    KEPT["count"] += 1\n'
        "    return output * 1.5 if isinstance(output, torch.Tensor) else output"
    ),
    "backward": 'def hook(module, ingoing, outgoing):\n    KEPT["count"] += 1',
    "gradient": (
        "def hook(gradient):\n" + '    KEPT["count"] += 1\n' + "    return gradient * 0.5"
    ),
    "accumulated": 'def hook(parameter):\n    KEPT["count"] += 1',
}
REGISTERED = {
    "before": "{}.register_forward_pre_hook(hook)",
    "backward": "{}.register_full_backward_hook(hook)",
    "gradient": "net.embed.weight.register_hook(hook)",
    "accumulated": "net.embed.weight.register_post_accumulate_grad_hook(hook)",
}
NAMES = ("seen", "z", "norms", "table", "array", "running", "last", "on", "turned")


def write(recipe: Recipe) -> str:
    """Return the script: it puts all that can be compared into its global ``RESULT``."""
    parts = (
        HEAD.format(
            seed=recipe.seed, at=recipe["at"], steps=recipe["steps"], batch=recipe["batch"]
        ),
        _classes(recipe),
        _criterion(recipe),
        _data(recipe),
        _made(recipe),
        _loop(recipe),
        f"NAMES = {NAMES}\n{TAIL}",
    )
    return '"""A random training loop."""\n\n' + "\n\n".join(parts)


def _within(lines: Iterable[str], depth: int) -> str:
    return "".join(indent(line, "    " * depth) + "\n" for line in lines if line)


def _outputs(recipe: Recipe) -> int:
    return 11 if recipe["loss"] == "padded" else 3


# --- the model ----------------------------------------------------------------------------------


def _classes(r: Recipe) -> str:
    return f"{_block(r)}\n\n{_net(r)}"


def _block(r: Recipe) -> str:
    act = ACTIVATIONS[r["activation"]]
    width = r["width"]
    layer = {
        "conv": f"nn.Conv1d({width}, {width}, 3, padding=1)",
        "images": f"nn.Conv2d({width}, {width}, 3, padding=1)",
        "attention": f"nn.MultiheadAttention({width}, 2, batch_first=True)",
    }.get(r["body"], f"nn.Linear({width}, {width})")
    made = [f"self.layer = {layer}"]
    run = (
        "self.layer(x, x, x, need_weights=False)[0]"
        if r["body"] == "attention"
        else "self.layer(x)"
    )
    if r["dropout"] != "none":
        made.append(f"self.drop = nn.Dropout({0.2 if r['dropout'] == 'drop' else 0.0})")
        run = f"self.drop({run})"
    return (
        "class Block(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        f"{_within(made, 2)}\n"
        "    def forward(self, x):\n"
        f"        return x + {act}({run})\n"
    )


def _net(r: Recipe) -> str:
    width = r["width"]
    embed = {
        "tokens": f"nn.Embedding(11, {width})",
        "conv": f"nn.Conv1d(3, {width}, 3, padding=1)",
        "images": f"nn.Conv2d(3, {width}, 3, padding=1)",
    }.get(r["body"], f"nn.Linear(6, {width})")
    depth = 1 if r["body"] == "linear" else 3
    made = [
        f"self.embed = {embed}",
        f"self.blocks = nn.ModuleList([Block() for _ in range({depth})])",
        "self.seen, self.on, self.turned = 0, False, 0" if _counts(r) else "self.on = False",
    ]
    if r["state"] in ("list", "dict", "array", "tensor"):
        made.append("self.norms, self.table, self.array = [], {}, numpy.zeros(1)")
        made.append("self.running = torch.zeros(())")
    if r["state"] == "buffer":
        made.append('self.register_buffer("mean", torch.zeros(()))')
    if r["switch"] == "buffer":
        made.append('self.register_buffer("count", torch.zeros((), dtype=torch.long))')
    if r["norm"] != "none":
        kind = {"layer": "nn.LayerNorm", "batch": "nn.BatchNorm1d"}[r["norm"]]
        made.append(f"self.norm = {kind}({width})")
    if r["tensor"] != "none":
        made.append(f"self.scale = torch.ones({width})  # no Parameter")
    if r["roots"] != "head":
        made.append(f"self.head = nn.Linear({width}, {_outputs(r)}{', bias=False' * r['tied']})")
    if r["tied"]:
        made.append("self.head.weight = self.embed.weight")
    return (
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        f"{_within(made, 2)}\n"
        f"    def forward(self, x{_parameters(r)}):\n"
        f"{_within(_forward(r), 2)}"
    )


def _counts(r: Recipe) -> bool:
    return bool(r["state"] == "counter" or r["switch"] == "counter")


def _parameters(r: Recipe) -> str:
    more = ", y=None" if r["place"] != "outside" else ""
    return more + (", strength=0.0" if r["switch"] == "argument" else "")


def _forward(r: Recipe) -> list[str]:
    lines = ["h = self.embed(x)", "for block in self.blocks:\n    h = block(h)"]
    if r["body"] in ("conv", "images"):
        lines.append("h = h.flatten(2).mean(-1)")
    elif r["body"] in ("tokens", "attention") and r["loss"] != "padded":
        lines.append("h = h.mean(1)")
    if r["norm"] != "none":
        lines.append("h = self.norm(h)")
    if r["tensor"] != "none":
        lines.append("h = h * self.scale")
    lines.append(STATES[r["state"]])
    if r["switch"] == "counter" and r["state"] != "counter":
        lines.append("self.seen += 1")
    if r["switch"] == "lazy" and r["state"] != "lazy":
        lines.append(STATES["lazy"])
    if r["switch"] == "buffer":
        lines.append("self.count += 1")
    if r["roots"] == "head":
        return [*lines, "return h"]
    lines.append("out = self.head(h)")
    if r["place"] == "outside":
        if _returns_extra(r):
            return [*lines, "extra = torch.zeros(())", *_extra(r), "return out, extra"]
        return [*lines, "return out"]
    lines += ["if y is None:\n    return out", "loss = criterion(out, y)"]
    if r["term"] != "none" and r["term_in"] == "model":
        lines += [each.replace("extra", "loss") for each in _extra(r)]
    return [
        *lines,
        {
            "inside": "return loss",
            "dict": 'return {"loss": loss, "out": out}',
            "tuple": "return loss, out",
            "keywords": "return loss, out",
        }[r["place"]],
    ]


def _returns_extra(r: Recipe) -> bool:
    """Return whether the model returns the term beside its output, to be added by the script."""
    return bool(r["place"] == "outside" and r["term"] != "none" and r["term_in"] == "model")


def _extra(r: Recipe) -> list[str]:
    """Return the lines that add the term to ``extra``, from when it is switched on."""
    owner = "self" if r["term_in"] == "model" else "net"
    term = {
        "sample": "0.1 * out.square().mean()",
        "batch": "0.1 * out.mean(0).square().sum()",
        "weights": f"0.01 * sum(p.square().sum() for p in {owner}.parameters())",
    }[r["term"]]
    if r["switch"] == "argument":
        return [f"extra = extra + strength * {term}"]
    condition = {
        "always": "",
        "counter": "self.seen > AT",
        "lazy": "self.z > AT",
        "buffer": "self.count > AT",
        "flag": f"{owner}.on",
        "global": "SWITCH",
    }[r["switch"]]
    line = f"extra = extra + {term}"
    return [f"if {condition}:\n    {line}" if condition else line]


def _criterion(r: Recipe) -> str:
    return f"def criterion(out, y):\n    return {LOSSES[r['loss']]}\n"


# --- the data -----------------------------------------------------------------------------------


def _data(r: Recipe) -> str:
    y = {
        "cross": "torch.randint(0, 3, (COUNT,))",
        "smoothed": "torch.randint(0, 3, (COUNT,))",
        "padded": "torch.randint(0, 11, (COUNT, 5))",
    }.get(r["loss"], "torch.randn(COUNT, 3)")
    lines = [f"COUNT = 3 * BATCH + {r['tail']}", f"X = {SHAPES[r['body']]}", f"Y = {y}"]
    if r["loss"] == "padded":
        lines.append("for row in range(COUNT):\n    Y[row, 1 + row % 5 :] = -100")
    if r["data"] == "loader":
        lines.append(
            "LOADER = torch.utils.data.DataLoader(\n"
            "    torch.utils.data.TensorDataset(X, Y), batch_size=BATCH, shuffle=True,\n"
            "    generator=torch.Generator().manual_seed(2),\n)"
        )
        lines.append(
            "def batches():\n    while True:\n        for x, y in LOADER:\n            yield x, y\n"
        )
        return "\n".join(lines)
    noise = {
        "tensors": "X[at]",
        "generator": "X[at] + 0.1 * torch.randn(X[at].shape, generator=GENERATOR)",
        "random_state": "X[at] + 0.1 * torch.as_tensor(STATE.randn(*X[at].shape))",
    }[r["data"]]
    if r["body"] == "tokens":
        noise = noise.split(" + ")[0]
    lines.append(
        "def batches():\n    while True:\n        for start in range(0, COUNT, BATCH):\n"
        "            at = slice(start, min(start + BATCH, COUNT))\n"
        f"            yield {noise}, Y[at]\n"
    )
    return "\n".join(lines)


# --- what is made before the loop ---------------------------------------------------------------


def _made(r: Recipe) -> str:
    lines = ["net = Net()", "EVERYTHING = nn.ModuleList([net])"]
    if r["roots"] == "head":
        lines.append(f"head = nn.Linear({r['width']}, {_outputs(r)})\nEVERYTHING.append(head)")
    if r["roots"] == "other":
        lines.append("other = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))")
        lines.append("EVERYTHING.append(other)")
        lines.append("other_optimizer = torch.optim.Adam(other.parameters(), lr=0.01)")
    if r["freeze"] in ("start", "thaw"):
        lines.append("net.embed.requires_grad_(False)")
    lines.append(
        "average = copy.deepcopy(net).requires_grad_(False)\nEVERYTHING.append(average)"
        if r["ema"] or r["roots"] == "teacher"
        else ""
    )
    lines.append("TENSORS = []")
    if r["tensor"] != "none":
        lines.append("TENSORS.append(net.scale)")
    if r["tensor"] == "start":
        lines.append("net.scale.requires_grad_()")
    lines += _optimizer(r)
    if r["hook"] != "none":
        lines.append(
            "\n\ndef first(output):\n    if isinstance(output, dict):\n"
            '        return output["loss"]\n'
            "    return output[0] if isinstance(output, tuple) else output\n\n"
        )
        on = "net" if r["hook_on"] == "root" else "net.blocks[0]"
        lines.append(HOOKS[r["hook"]] + "\n\n")
        registered = REGISTERED.get(r["hook"], "{}.register_forward_hook(hook)").format(on)
        if "net.embed" in registered:
            registered = f"if net.embed.weight.requires_grad:\n    {registered}"
        if r["late"] != "hook":
            lines.append(registered)
        else:
            lines.append(f"def begin():\n{indent(registered, '    ')}\n")
    return _within(lines, 0)


def _optimizer(r: Recipe) -> list[str]:
    lines = ["trained = list(net.parameters())"]
    if r["roots"] == "head":
        lines.append("trained += head.parameters()")
    if r["tensor"] == "start":
        lines.append("trained.append(net.scale)")
    if r["freeze"] == "freeze_all":  # something has to be left to train
        lines.append("anchor = nn.Parameter(torch.ones(3))")
        lines.append("trained.append(anchor)\nTENSORS.append(anchor)")
    kind = r["optimizer"]
    given = "trained"
    if r["groups"] == 2:
        given = '[{"params": trained[:1], "lr": 0.001}, {"params": trained[1:]}]'
    if kind == "two":
        lines.append("optimizer = torch.optim.AdamW(trained[1:], lr=0.01)")
        lines.append("second = torch.optim.SGD(trained[:1], lr=0.05, momentum=0.5)")
    elif kind != "own":
        lines.append(f"optimizer = {OPTIMIZERS[kind].format(given)}")
    if r["scheduler"] != "none":
        lines.append(f"scheduler = {SCHEDULERS[r['scheduler']]}")
    return lines


# --- the loop -----------------------------------------------------------------------------------


def _loop(r: Recipe) -> str:
    head = "DATA = batches()\n" + ("EVERYTHING.train()\n" if r["evaluation"] != "none" else "")
    body = [*_events(r), *(_closure(r) if r["closure"] else _passes(r)), *_after(r)]
    return f"{head}for step in range(STEPS):\n{_within(body, 1)}"


def _events(r: Recipe) -> list[str]:
    """Return what changes in mid-run."""
    lines = []
    if r["switch"] in ("flag", "global"):
        lines.append(
            "if step == AT:\n    " + ("net.on = True" if r["switch"] == "flag" else "SWITCH = True")
        )
    lines.append(
        {
            "freeze": "if step == AT:\n    net.embed.requires_grad_(False)",
            "thaw": "if step == AT:\n    net.embed.requires_grad_(True)",
            "freeze_all": "if step == AT:\n    for p in net.parameters():\n"
            "        p.requires_grad_(False)",
            "alternate": "net.embed.requires_grad_(step % 2 == 0)",
        }.get(r["freeze"], "")
    )
    if r["tensor"] in ("late", "own_step"):
        later = "\n    optimizer.add_param_group({'params': [net.scale]})"
        adds = r["tensor"] == "late" and r["optimizer"] != "own"
        lines.append("if step == AT:\n    net.scale.requires_grad_()" + later * adds)
    if r["late"] == "hook":
        lines.append("if step == AT:\n    begin()")
    if r["late"] == "head":
        lines.append(
            f"if step == AT:\n    net.head = nn.Linear({r['width']}, {_outputs(r)})\n"
            "    optimizer.add_param_group({'params': list(net.head.parameters())})"
        )
    return lines


def _zero(r: Recipe) -> str:
    second = "\nsecond.zero_grad()" if r["optimizer"] == "two" else ""
    return {
        "in_place": "optimizer.zero_grad(set_to_none=False)" + second,
        "model": "EVERYTHING.zero_grad()",
        "by_hand": "for p in EVERYTHING.parameters():\n    p.grad = None",
    }.get(r["zero"], "optimizer.zero_grad()" + second)


def _call(r: Recipe, x: str = "x") -> list[str]:
    """Return the lines that make ``out`` and ``loss`` of a batch."""
    strength = ", strength=0.1 * (step >= AT)" if r["switch"] == "argument" else ""
    labels = {"outside": "", "keywords": ", y=y"}.get(r["place"], ", y")
    call = f"net({x}{labels}{strength})"
    if r["place"] == "keywords":
        call = f"net(x={x}{labels}{strength})"
    if r["roots"] == "head":
        return [f"out = head({call})", "loss = criterion(out, y)"]
    if r["place"] == "outside":
        if _returns_extra(r):
            return [f"out, extra = {call}", "loss = criterion(out, y) + extra"]
        return [f"out = {call}", "loss = criterion(out, y)"]
    if r["place"] == "inside":
        return [f"loss = {call}"]
    if r["place"] == "dict":
        return [f"result = {call}", 'loss, out = result["loss"], result["out"]']
    return [f"loss, out = {call}"]


def _passes(r: Recipe) -> list[str]:
    """Return the lines of all forward and backward passes of a step."""
    if r["accumulate"] == 1:
        before = [] if r["zero"] == "after" else [_zero(r)]
        return [*before, "x, y = next(DATA)", *_one(r)]
    body = _within(["x, y = next(DATA)", *_one(r)], 1)
    before = [] if r["zero"] == "after" else [_zero(r)]
    return [*before, f"for part in range({r['accumulate']}):\n{body}".rstrip()]


def _loss(r: Recipe) -> list[str]:
    lines = []
    if r["penalty"] == "inputs":
        lines.append("x = x.clone().requires_grad_()")
    if r["late"] == "replay":
        plainly = "\n".join(["state = torch.get_rng_state()", *_call(r)])
        replayed = f"with torch.no_grad():\n{indent(plainly, '    ')}\ntorch.set_rng_state(state)"
        lines.append(f"if step >= AT:\n{indent(replayed, '    ')}")
    lines += _call(r)
    if r["late"] == "grad":
        lines.append(
            "if step >= AT:\n"
            "    (slope,) = torch.autograd.grad(loss, net.head.weight, retain_graph=True)\n"
            "    loss = loss * (1 + 0.1 * slope.norm().detach())"
        )
    if r["term"] != "none" and r["term_in"] == "loop" and r["place"] != "inside":
        lines += [each.replace("extra", "loss") for each in _extra(r)]
    if r["roots"] == "twice":
        again = [
            each.replace("out", "again").replace("loss", "more") for each in _call(r, "x.flip(0)")
        ]
        again = [
            each.replace("criterion(again, y)", "criterion(again, y.flip(0))") for each in again
        ]
        lines += [*again, "loss = loss + more + 0.1 * (out - again.flip(0)).square().mean()"]
    if r["roots"] == "chained":
        more = [each.replace("loss", "more") for each in _call(r, "F.pad(out.detach(), (0, 3))")]
        lines += [*more, "loss = loss + 0.5 * more"]
    if r["roots"] == "teacher":
        first = (
            "[0]"
            if r["place"] == "outside" and r["term"] != "none" and r["term_in"] == "model"
            else ""
        )
        lines += [
            f"with torch.no_grad():\n    target = average(x){first}",
            "loss = loss + 0.1 * (out - target).square().mean()",
        ]
    if r["freeze"] == "freeze_all":
        lines.append("loss = loss + 0.1 * anchor.square().sum()")
    penalty = {
        "inputs": "(slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)\n"
        "loss = loss + 0.01 * slope.square().mean()",
        "parameters": "slopes = torch.autograd.grad(loss, trained[1:3], create_graph=True)\n"
        "loss = loss + 0.01 * sum(each.square().sum() for each in slopes)",
    }.get(r["penalty"], "")
    late = f"if step >= AT:\n{indent(penalty, '    ')}"
    return [*lines, late if r["late"] == "penalty" else penalty]


def _one(r: Recipe) -> list[str]:
    lines = _loss(r)
    logged = {"end": "LOSSES.append(loss.detach())"}.get(r["log"], "LOSSES.append(loss.item())")
    over = f" / {r['accumulate']}" if r["accumulate"] > 1 else ""
    backward = f"(loss{over}).backward()" if over else "loss.backward()"
    return [*lines, *((logged, backward) if r["log"] == "before" else (backward, logged))]


def _closure(r: Recipe) -> list[str]:
    body = _within([_zero(r), *_loss(r), "loss.backward()", "return loss"], 1).rstrip()
    if r["penalty"] == "inputs":
        body = body.replace("x = x.clone().requires_grad_()", "x = given.clone().requires_grad_()")
    return [
        "given, y = next(DATA)\nx = given" if r["penalty"] == "inputs" else "x, y = next(DATA)",
        f"def closure():\n{body}",
        *_clipped(r),
        "loss = optimizer.step(closure)",
        "LOSSES.append(loss.item())",
    ]


def _clipped(r: Recipe) -> list[str]:
    if r["closure"]:
        return []
    return [
        {
            "none": "",
            "norm": "SEEN.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5))",
            "value": "nn.utils.clip_grad_value_(net.parameters(), 0.1)",
            "own": "for p in net.parameters():\n    if p.grad is not None:\n"
            "        p.grad.mul_(min(1.0, 0.5 / float(p.grad.norm() + 1e-6)))",
        }[r["clip"]]
    ]


def _after(r: Recipe) -> list[str]:
    """Return the lines that follow the backward pass."""
    lines = []
    if not r["closure"]:
        lines += _clipped(r)
        if r["look"] != "none":
            value = {"norms": "float(p.grad.norm())", "values": "p.grad.clone()"}[r["look"]]
            lines.append(f"SEEN.append([{value} for p in net.parameters() if p.grad is not None])")
        if r["optimizer"] == "own":
            lines.append(
                "with torch.no_grad():\n    for p in trained:\n        if p.grad is not None:\n"
                "            p -= 0.05 * p.grad"
            )
        else:
            lines.append("optimizer.step()")
        lines.append("second.step()" if r["optimizer"] == "two" else "")
    if r["tensor"] in ("late", "own_step") and (
        r["tensor"] == "own_step" or r["optimizer"] == "own"
    ):
        lines.append(
            "if net.scale.grad is not None:\n    with torch.no_grad():\n"
            "        net.scale -= 0.05 * net.scale.grad\n    net.scale.grad = None"
        )
    if r["roots"] == "other":
        lines.append(
            "other_optimizer.zero_grad()\n"
            "z = torch.ones(BATCH, 3) * step\n"
            "second_loss = (other(z) - 1).square().mean()\n"
            "second_loss.backward()\nother_optimizer.step()\nSEEN.append(second_loss.item())"
        )
    if r["scheduler"] != "none":
        value = "float(LOSSES[-1])" if r["scheduler"] == "plateau" else ""
        lines.append(f"scheduler.step({value})\nSEEN.append(optimizer.param_groups[0]['lr'])")
    if r["ema"] or r["roots"] == "teacher":
        lines.append(
            "with torch.no_grad():\n"
            "    for old, new in zip(average.parameters(), net.parameters()):\n"
            "        old.lerp_(new, 0.1)"
        )
    if r["zero"] == "after" and not r["closure"]:
        lines.append(_zero(r))
    if r["evaluation"] != "none":
        mode = {"inference": "torch.inference_mode()"}.get(r["evaluation"], "torch.no_grad()")
        evaluate = "net.eval()\n    " if r["evaluation"] != "train_mode" else ""
        lines.append(
            f"if step % 3 == 1:\n    {evaluate}with {mode}:\n"
            "        result = net(X[:4])\n"
            "        result = result[0] if isinstance(result, tuple) else result\n"
            "        SEEN.append(float(result.sum()))\n"
            "    net.train()"
        )
    return lines
