"""A decoder with random weights, whose loop one thread drives: no server is beside it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch

from builder.publish.model_configs import ServingOptions
from hplm.engine.backbone import Backbone
from hplm.errors import HplmError
from hplm.generation.cache import Cache
from hplm.generation.loop import Loop
from hplm.generation.queue import SequenceQueue
from hplm.generation.request import AnswerPart, DecoderRequest, PinnedTenant
from hplm.generation.running import RunningSequences
from hplm.generation.sampling import Sampling
from hplm.generation.staging import Decoder, DecoderStager, Staged
from hplm.model.config import RMS, UNUSED, BackboneConfig
from hplm.model.windows import Window
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import policy
from hplm.tenants.snapshot import Tenant

CPU = torch.device("cpu")
START, PROMPT_TOKENS = 1, 64
STEP_TOKENS, CACHE_TOKENS, KEPT_BYTES = 256, 16_384, 256 * 10**6
OPTIONS, RANK = ServingOptions(dtype="fp32", device="cpu"), 4  # of a server, and of tenants' LoRAs
SHAPES = {"smollm2": (49_152, 576, 9, 1536, 3), "toy": (512, 64, 4, 128, 2)}  # vocabulary, hidden, heads, inner, heads of keys


def config_of(size: str, layers: int, lower: int) -> BackboneConfig:
    """`size`: one of `SHAPES`. `lower`: those of the layers that the table replaces."""
    vocabulary, hidden, heads, inner, kv_heads = SHAPES[size]
    return BackboneConfig(
        size, vocabulary, hidden, heads, inner, lower, layers - lower, 4096, 0, "silu", 1e-5, UNUSED, UNUSED, UNUSED,
        UNUSED, Window(3 if lower else 1, causal=True), kv_heads=kv_heads, norm=RMS, pre_norm=True, biases=False,
        gated=True, rotary_base=100_000.0, start_id=START,
    )  # fmt: skip


class TimedDecoder(Decoder):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.took: list[float] = []  # the seconds of each step

    def run(self, step: Staged) -> torch.Tensor:
        start = time.perf_counter()
        logits = super().run(step)
        self.took.append(time.perf_counter() - start)
        return logits


class Bench:
    """A loop that one thread drives, on an exported decoder."""

    def __init__(self, folder: Path, max_sequences: int = 16, kept_bytes: int = KEPT_BYTES) -> None:
        backbone = Backbone(folder / "1")
        self.config = config = backbone.config
        self.view, upper = backbone.view, backbone.upper()
        self.weights = sum(weight.numel() for weight in upper.parameters())
        cache = Cache(CACHE_TOKENS, config.positions, config.upper_layers, config.key_width, CPU)
        self.running = RunningSequences(cache, max_sequences, STEP_TOKENS, finished=0)  # rounds have the same prompts
        self.queue = SequenceQueue(policy("timely"), Limits(100_000, 10**10), self.running)
        stager = DecoderStager(backbone, cache, max_sequences, kept_bytes=kept_bytes)
        self.decoder = TimedDecoder(upper, CPU, torch.float32)
        self.loop = Loop(self.queue, stager, self.decoder, ())

    def ask(self, prompt: Sequence[int], count: int, tenant: Tenant | None = None) -> None:
        chain = self.view.forest.chain("root", 1)
        id, uid, adapter = ("bench", 1, None) if tenant is None else (tenant.id, tenant.uid, tenant.adapter)
        ids = [START, *prompt]
        sampling = Sampling(temperature=0, max_tokens=count, logprobs=None)
        pinned, now = PinnedTenant(id, uid, 1, chain, adapter), time.monotonic_ns()
        self.loop.enqueue(DecoderRequest(pinned, ids, sampling, _take, _decode, arrival_ns=now, seed=0))

    def answer(
        self, prompts: Sequence[Sequence[int]], counts: Sequence[int], tenants: Iterable[Tenant | None] = repeat(None)
    ) -> float:
        """Answers prompts with so many tokens each. Returns the tokens a second. Without `tenants` nothing is adapted."""
        for prompt, count, tenant in zip(prompts, counts, tenants, strict=False):
            self.ask(prompt, count, tenant)
        return sum(counts) / self.run()

    def run(self) -> float:
        """Answers all requests. Returns how long it took."""
        start = time.perf_counter()
        while self.loop.step() or len(self.running) or len(self.queue):
            pass
        return time.perf_counter() - start


def _take(piece: AnswerPart | HplmError) -> None:
    if isinstance(piece, HplmError):
        raise piece


def _decode(ids: Sequence[int]) -> str:
    """Turns each token into a character. Tokenizers differ, and none is measured here."""
    return "".join(chr(0x4E00 + id % 20_000) for id in ids)


def prompts_of(config: BackboneConfig, count: int, tokens: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(2, config.vocabulary, (count, tokens)).tolist()
