"""What it costs to tell the kind of a call: its signature, and the shape of its graph.

    python benchmarks/signatures.py [--device cuda] [--batch 16] [--length 1024] [--parts 4]

GPT-2 medium from its configuration, under autocast in bf16: the faster a step, the larger the
share. A split step asks for one signature, and for the shape of each part's graph. The times are
the host's, whether or not the device waited for it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from autofit.worker.harness.graph import Shapes
from autofit.worker.harness.joining import Batch
from autofit.worker.harness.signature import Signatures

ROUNDS = 10


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--parts", type=int, default=4)
    options = parser.parse_args()
    config = GPT2Config(n_layer=options.layers, n_embd=1024, n_head=16)
    with torch.device(options.device):
        model = GPT2LMHeadModel(config).train()
        words = torch.randint(50257, (options.batch, options.length))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    cuda = options.device == "cuda"
    wait: Callable[[], None] = torch.cuda.synchronize if cuda else lambda: None
    parameters = list(model.parameters())
    signatures, shapes = Signatures(lambda: model), Shapes()
    taken: dict[str, list[float]] = {"step": [], "signature": [], "shape": []}

    def timed(name: str, run: Callable[[], object]) -> None:
        started = time.perf_counter()
        run()
        taken[name].append(time.perf_counter() - started)

    for _ in range(ROUNDS):
        wait()
        started = time.perf_counter()
        with torch.autocast(options.device, torch.bfloat16):
            output = model(input_ids=words, labels=words, use_cache=False)
        forward = time.perf_counter()
        batch = Batch.of((), {"input_ids": words, "labels": words, "use_cache": False})
        timed("signature", lambda batch=batch: signatures.of(batch, gradients=True))  # type: ignore[misc]
        timed("shape", lambda output=output: shapes.of([output.loss, output.logits], parameters))  # type: ignore[misc]
        resumed = time.perf_counter()
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wait()
        taken["step"].append(time.perf_counter() - resumed + forward - started)
    step, signature, shape = (statistics.median(taken[name][2:]) for name in taken)
    print(
        f"step {step * 1e3:.1f} ms, signature {signature * 1e3:.2f} ms, shape {shape * 1e3:.2f} ms"
    )
    for parts in (1, options.parts):
        print(f"{parts} parts: {(signature + parts * shape) / step:.2%} of a step")


if __name__ == "__main__":
    main()
