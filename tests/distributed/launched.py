"""A program that accelerate launch starts in several processes: its own loop, with fit and without.

A Trainer is the same there, but imports for ten seconds in each process.
"""

import contextlib
import io
import sys
from pathlib import Path

import torch
from libraries import library
from ranks import whole
from sharded_steps import ROWS, WIDTH, network

import memsave_ext as ms


def train(technique=None):
    """Accumulates and clips; returns losses, norms, weights and what fit has printed."""
    accelerator = library("accelerate").Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = network(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.utils.data.DataLoader(torch.randn(8 * ROWS, WIDTH), batch_size=ROWS)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    said = io.StringIO()
    if technique is not None:
        with contextlib.redirect_stdout(said):
            fitted = ms.fit(
                model, optimizer, next(iter(data)), budget="1GB", loss=square, micro_batches=2,
                in_backward=False, technique=technique,
            )  # fmt: skip
        assert fitted.technique == technique
    losses, norms = [], []
    for batch in data:
        with accelerator.accumulate(model):
            loss = square(model(batch))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.1).item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, norms, whole(model.parameters()), said.getvalue()


def square(result):
    return result.square().mean()


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = train(), train("checkpoint by block")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.save((world, *results), Path(sys.argv[1], f"{rank}.pt"))
    torch.distributed.destroy_process_group()
