"""Evaluation inside the loop, on larger batches, the best weights kept; messages by logging."""

import argparse
import copy
import logging

import torch
from model import Net
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
log = logging.getLogger("train")


def loader_of(rows, size):
    x = torch.randn(rows, 8)
    return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=size)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    right = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    model.train()
    return right / len(loader.dataset)


def main(args):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    train, held_out = loader_of(5 * args.batch_size, args.batch_size), loader_of(120, 60)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, nesterov=True, momentum=0.9)
    print(f"before: {evaluate(model, held_out):.4f}")
    best, kept = -1.0, None
    for epoch in range(4):
        for x, y in train:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        accuracy = evaluate(model, held_out)
        log.info("epoch %d loss %.12f accuracy %.4f", epoch, loss.item(), accuracy)
        if accuracy > best:
            best, kept = accuracy, copy.deepcopy(model.state_dict())
    print(f"best {best:.4f}")
    torch.save({"last": model.state_dict(), "best": kept}, args.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="model.pt")
    parser.add_argument("--batch-size", type=int, default=16)
    main(parser.parse_args())
