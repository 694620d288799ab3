"""A DataLoader with a worker; the last batch of an epoch is smaller."""

import argparse

import torch
from model import Net
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="model.pt")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    x = torch.randn(5 * args.batch_size - 10, 8)
    data = TensorDataset(x, x[:, :4].argmax(1))
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, num_workers=1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(args.epochs):
        total = 0.0
        for inputs, labels in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(inputs)
        print(f"epoch {epoch}: {len(loader)} batches, loss {total / len(data):.12f}")
    torch.save(model.state_dict(), args.out)


if __name__ == "__main__":
    main()
