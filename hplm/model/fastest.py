"""The number format in which a CPU computes fastest, which is what `auto` means: fp32 or bf16, for serving and for training.

That a CPU has instructions for bf16 does not tell: some Xeons compute a layer in bf16 at 0.6 of the speed of fp32. So a layer
is measured, in a second or less, and the result is kept beside the compiled kernels for each kind of machine. One thread is
measured by its own time, so that other programs do not count, and neither do other threads.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from pathlib import Path

import msgspec
import torch

from hplm.compiled import LIBRARY
from hplm.model.attention import PackedAttention
from hplm.model.config import UNUSED, BackboneConfig
from hplm.model.layer import Layer
from hplm.model.products import Prepacked, can_prepack, replace_products

log = logging.getLogger(__name__)
FILE = LIBRARY.with_name("_fastest.json")
CPU = torch.device("cpu")
SERVING, TRAINING = "serving", "training"
WORTH = 1.03  # times the speed of fp32: below, bf16 is not worth its rounding
ROUNDS, SECONDS = 3, 0.6  # of each format at least, and of both together
HOPELESS = 3.0  # times the time of fp32: one round is enough
TEXTS, TOKENS = {SERVING: 4, TRAINING: 2}, 128
BERT_BASE = BackboneConfig(
    "bert-base", vocabulary=1, hidden=768, heads=12, intermediate=3072, lower_layers=0, upper_layers=1, positions=TOKENS,
    segments=1, activation="gelu", norm_eps=1e-12, cls_id=UNUSED, sep_id=UNUSED, unk_id=UNUSED, mask_id=UNUSED,
)  # fmt: skip
# Lines of /proc/cpuinfo that tell machines apart, and the variables that keep libraries from using instructions.
FACTS = {"vendor_id", "cpu family", "model", "model name", "stepping", "cache size", "flags"}
LIMITS = "ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA"


@dataclass(frozen=True)
class Fastest:
    work: str
    speed: float | None  # of bf16, in times the speed of fp32; None: the CPU has no instructions for it

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.speed is not None and self.speed >= WORTH else torch.float32

    def __str__(self) -> str:
        name = "bf16" if self.dtype is torch.bfloat16 else "fp32"
        if self.speed is None:
            return f"{self.work} is in {name}: this CPU has no instructions for bf16"
        return f"{self.work} is in {name}: here bf16 has {self.speed:.2f} x the speed of fp32"


@cache
def fastest(work: str = SERVING) -> Fastest:
    """Returns the faster format of this machine's CPU for SERVING or TRAINING. Measures if nobody has."""
    # A private name, because torch 2.10 may not have the public get_capabilities() yet.
    if not torch.cpu._is_avx512_bf16_supported():  # pyright: ignore[reportPrivateUsage]
        return _logged(Fastest(work, None))
    key = f"{_machine()}, {work}"
    if (speed := _kept().get(key)) is not None:
        return _logged(Fastest(work, speed))
    speed = measured(work)
    try:
        speed = _keep(key, speed)
    except OSError as error:
        log.warning(
            "%s cannot be written (%s): each process measures again whether bf16 or fp32 is faster", FILE, error.strerror
        )
    return _logged(Fastest(work, speed))


def _logged(result: Fastest) -> Fastest:
    log.info("%s", result)
    return result


def measured(work: str) -> float:
    """Returns the speed of bf16, in times the speed of fp32. A layer of BERT-base computes, as it does in `work`."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        make = _serving if work == SERVING else _training
        runs = [make(dtype) for dtype in (torch.float32, torch.bfloat16)]
        least, spent = [math.inf, math.inf], 0.0
        for number in range(1000):
            taken = [_seconds(run) for run in runs]  # in turn
            if number == 0 and taken[1] < HOPELESS * taken[0]:
                continue  # the first one warms up
            least, spent = [min(pair) for pair in zip(least, taken, strict=True)], spent + sum(taken)
            if number == 0 or (number >= ROUNDS and spent > SECONDS):
                break
        return least[0] / least[1]
    finally:
        torch.set_num_threads(before)


def _seconds(run: Callable[[], object]) -> float:
    began = time.thread_time()
    run()
    return time.thread_time() - began


def _serving(dtype: torch.dtype) -> Callable[[], object]:
    layer, rows = Layer(BERT_BASE).to(dtype), TEXTS[SERVING] * TOKENS
    if can_prepack(CPU, dtype):
        replace_products(layer, Prepacked)
    x, attend = torch.randn(rows, BERT_BASE.hidden, dtype=dtype), PackedAttention([TOKENS] * TEXTS[SERVING], BERT_BASE.heads)
    return torch.inference_mode()(partial(layer, x, attend))


def _training(dtype: torch.dtype) -> Callable[[], object]:
    layer, texts = Layer(BERT_BASE), TEXTS[TRAINING]
    x, attend = torch.randn(texts * TOKENS, BERT_BASE.hidden), PackedAttention([TOKENS] * texts, BERT_BASE.heads)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16, dtype is torch.bfloat16):
            out = layer(x, attend)
        out.float().sum().backward()
        layer.zero_grad()

    return torch.enable_grad()(run)


@cache
def _machine() -> str:
    """Names what the speeds depend on: the processor, what its programs may use of it, and torch."""
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text("utf-8").partition("\n\n")[0].splitlines()]
    facts = {name.strip(): value.strip() for name, _, value in lines if name.strip() in FACTS}
    limits = {name: os.environ[name] for name in LIMITS if name in os.environ}
    digest = sha256(json.dumps([facts, limits]).encode()).hexdigest()[:8]
    return f"{facts.get('model name', 'a processor')} {digest}, torch {torch.__version__}"


def _kept() -> dict[str, float]:
    """Returns the speeds of the file. One that cannot be read is as none: it is written anew."""
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(FILE.read_bytes(), type=dict[str, float])
    return {}


def _keep(key: str, speed: float) -> float:
    """Returns the speed that counts: another process may have measured and kept one meanwhile."""
    kept = {key: speed, **_kept()}
    temporary = FILE.with_name(f"{FILE.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
        temporary.replace(FILE)
    finally:
        temporary.unlink(missing_ok=True)
    return kept[key]
