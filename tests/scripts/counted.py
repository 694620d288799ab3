"""Counts what is called until the first optimizer step is done, and prints what that has changed.

``--stateful``: the model, its hook and the script keep state of every kind besides.
"""

import argparse
import json
import random
from queue import SimpleQueue

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SAMPLES, WIDTH = 8, 6
CALLS = {
    name: SimpleQueue()
    for name in ("model", "block", "hook", "hook of a block", "loss", "sample", "collate")
}
SEEN = torch.zeros(WIDTH)
COUNTS = {"calls": 0}


@torch.compiler.disable
def count(name):
    CALLS[name].put(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        count("block")
        return x + torch.tanh(self.inner(self.norm(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        count("model")
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Stateful(Net):
    """Keeps the state of ten kinds that ``state_dict`` knows nothing of."""

    def __init__(self):
        super().__init__()
        self.tensor = torch.zeros(WIDTH)
        self.list = []
        self.dict = {"sums": []}
        self.array = np.zeros(WIDTH)
        self.generator = torch.Generator().manual_seed(1)
        self.random = np.random.RandomState(2)
        self.number = 0

    def forward(self, x):
        found = x.detach()
        self.tensor += found.sum(0)
        self.list.append(float(found.sum()))
        self.dict["sums"].append(found.mean(0))
        self.array += found.sum(0).numpy()
        torch.rand(len(x), generator=self.generator)
        self.random.rand(len(x))
        self.number += len(x)
        self.lazily = getattr(self, "lazily", 0) + len(x)
        SEEN.add_(found.sum(0))
        COUNTS["calls"] += 1
        return super().forward(x)


class MeanOfFeatures:
    """A hook that keeps a running mean."""

    def __init__(self):
        self.mean = torch.zeros(3)

    def __call__(self, module, args, output):
        self.mean = 0.9 * self.mean + 0.1 * output.detach().mean(0)


class Samples(Dataset):
    def __init__(self):
        self.x = torch.randn(3 * SAMPLES, WIDTH)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        count("sample")
        return self.x[index], self.x[index, :3].argmax()


def collate(samples):
    count("collate")
    return torch.utils.data.default_collate(samples)


class Loss(nn.Module):
    def forward(self, output, target):
        count("loss")
        return nn.functional.cross_entropy(output, target)


def drawn_from(generator):
    """Return what a generator says of how often it was drawn from."""
    return hash(generator.get_state().numpy().tobytes())


def state(model, hook):
    if not isinstance(model, Stateful):
        return {}
    return {
        "tensor": model.tensor.tolist(),
        "list": model.list,
        "dict": [each.tolist() for each in model.dict["sums"]],
        "array": model.array.tolist(),
        "generator": drawn_from(model.generator),
        "random": model.random.rand(),
        "number": model.number,
        "made lazily": model.lazily,
        "hook": hook.mean.tolist(),
        "global tensor": SEEN.tolist(),
        "global dict": COUNTS,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="model.pt")
    parser.add_argument("--stateful", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(
        Samples(), SAMPLES, shuffle=True, generator=generator, collate_fn=collate, num_workers=0
    )
    model = Stateful() if args.stateful else Net()
    hook = MeanOfFeatures()
    if args.stateful:
        model.register_forward_hook(hook)
    model.register_forward_hook(lambda *_: count("hook"))
    model.blocks[0].register_forward_hook(lambda *_: count("hook of a block"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of = Loss()
    for step, (x, target) in enumerate(loader):
        optimizer.zero_grad()
        loss = loss_of(model(x), target)
        loss.backward()
        optimizer.step()
        if step == 0:
            counts = {name: calls.qsize() for name, calls in CALLS.items()}
            draws = {
                "torch": drawn_from(torch.default_generator),
                "loader": drawn_from(generator),
                "python": random.random(),
                "numpy": np.random.rand(),
            }
            print(json.dumps({"calls": counts, "draws": draws, "state": state(model, hook)}))
    torch.save(model.state_dict(), args.out)


if __name__ == "__main__":
    main()
