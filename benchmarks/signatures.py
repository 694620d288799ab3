"""What it costs to tell the kind of a call: its signature, and the shape of its graph.

    python benchmarks/signatures.py [--device cuda] [--batch 16] [--length 1024] [--parts 4]

GPT-2 medium from its configuration, under autocast in bf16: the faster a step, the larger the
share. A split step asks for one signature, and for the shape of each part's graph. Two figures: the
host's own time for that, and what becomes of a step's time, as the host is ahead of the device.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from autofit.worker.harness.batch.layout import Batch
from autofit.worker.harness.torch_state.graph import Shapes
from autofit.worker.harness.torch_state.module_watch import ModuleWatch
from autofit.worker.harness.verification.call_signature import Signatures

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
    watch, shapes = ModuleWatch(lambda: model), Shapes()
    signatures = Signatures(lambda: model, watch)
    taken: dict[str, list[float]] = {"asked": [], "plain": [], "signature": [], "shape": []}

    def timed(name: str, run: Callable[[], object]) -> None:
        started = time.perf_counter()
        run()
        taken[name].append(time.perf_counter() - started)

    def kind_of(batch: Batch) -> object:
        watch.look()
        return signatures.of(batch, gradients=True)

    def step(asks: bool) -> None:
        for part in words.chunk(options.parts):
            with torch.autocast(options.device, torch.bfloat16):
                output = model(input_ids=part, labels=part, use_cache=False)
            if asks:
                timed("shape", partial(shapes.of, [output.loss, output.logits], parameters))
            output.loss.backward()
        if asks:
            batch = Batch.of((), {"input_ids": words, "labels": words, "use_cache": False})
            timed("signature", lambda: kind_of(batch))
        optimizer.step()
        optimizer.zero_grad()
        wait()

    for number in range(2 * ROUNDS):
        asks = number % 2 == 0
        wait()
        timed("asked" if asks else "plain", lambda asks=asks: step(asks))  # type: ignore[misc]
    asked, plain, signature, shape = (
        statistics.median(found[len(found) // 5 :]) for found in taken.values()
    )
    host = signature + options.parts * shape
    sys.stdout.write(
        f"{options.parts} parts: step {plain * 1e3:.1f} ms, asked {asked * 1e3:.1f} ms"
        f" ({asked / plain - 1:+.2%})\n"
        f"host: signature {signature * 1e3:.2f} ms, a graph's shape {shape * 1e3:.2f} ms,"
        f" together {host / plain:.2%} of a step\n"
    )


if __name__ == "__main__":
    main()
