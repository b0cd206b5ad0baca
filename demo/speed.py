"""Measures how fast this machine does the demo's work: about a second of each kind."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from builder.hardware import half_precision
from builder.packed_batches import positions_of
from builder.training.bodies import PlotBody
from builder.training.examples import Pack
from builder.training.finetuning import TrainingOptions, tenant_model
from demo.docstrings import read_definitions, without_cycle_collection
from demo.plan import Speed
from hplm.model.checkpoint import load_checkpoint, split
from hplm.model.config import BackboneConfig
from hplm.model.stacks import LowerStack, UpperStack

SECONDS = 1.0  # of each kind of work
NGRAMS = 1024  # at a time
TEXTS, TOKENS, LABELS = 8, 60, 8  # of a training step


def measure(model: str, files: list[Path], device: torch.device) -> Speed:
    """`files`: Python source files, of which some are parsed."""
    checkpoint = load_checkpoint(model)
    lower, upper = split(checkpoint)
    return Speed(
        parsed=_parsed(files),
        ngrams=_ngrams(checkpoint.config, lower, device),
        trained=_trained(checkpoint.config, upper, device),
        vocabulary=checkpoint.config.vocabulary,
    )


def _parsed(files: list[Path]) -> float:
    """Reads a hundredth of the files, from everywhere in the list: packages are written in different ways."""
    some = files[:: max(1, len(files) // 100)]
    started = time.perf_counter()
    with without_cycle_collection():
        for file in some:
            read_definitions("", "", file)
    return sum(file.stat().st_size for file in some) / (time.perf_counter() - started)


def _ngrams(config: BackboneConfig, lower: LowerStack, device: torch.device) -> float:
    chosen = torch.from_numpy(np.random.default_rng(0).integers(1, config.vocabulary, (NGRAMS, config.window.n))).to(device)
    lower = lower.to(device).eval()

    @torch.inference_mode()
    def compute() -> None:
        lower(chosen).cpu()

    return NGRAMS * _rate(compute)


def _trained(config: BackboneConfig, upper: UpperStack, device: torch.device) -> float:
    body = PlotBody(upper, config.heads).to(device).eval().requires_grad_(False)
    model = tenant_model(config, LABELS, TrainingOptions()).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    lengths = np.full(TEXTS, TOKENS)
    tokens, positions = torch.zeros(TEXTS * TOKENS, dtype=torch.int64), torch.from_numpy(positions_of(lengths))
    pack = Pack(
        texts=[],
        sums=torch.randn(len(tokens), config.hidden).to(device),
        tokens=tokens.to(device),
        positions=positions.to(device),
        segments=tokens.to(device),
        lengths=lengths.tolist(),
        reading=torch.arange(0, len(tokens), TOKENS).to(device),
        rows_of=[1] * TEXTS,
        targets=tokens[:TEXTS].to(device),
    )

    def step() -> None:
        with half_precision(device):
            logits = model(body, pack)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, pack.targets).backward()
        optimizer.step()

    return len(tokens) * _rate(step)


def _rate(work: Callable[[], None]) -> float:
    """Returns calls a second, by the median call: other work of the machine must not count. The first call allocates memory."""
    work()
    took: list[float] = []
    while len(took) < 3 or sum(took) < SECONDS:
        started = time.perf_counter()
        work()
        took.append(time.perf_counter() - started)
    return 1 / float(np.median(took))
