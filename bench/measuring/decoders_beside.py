"""An hGPT beside whole models of its tenants, of which few fit in memory, and behind Triton beside the same loop alone."""

from __future__ import annotations

import tempfile
import time
from collections import OrderedDict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file

from bench.measuring.cancel_load import Cancelling
from bench.measuring.decoders import Bench, GenerateBench, Model, in_turn, lengths_of, prompts_of
from bench.measuring.stream_load import TextStreams
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import TenantFile
from hplm.model.stacks import UpperStack
from hplm.server import TritonServer
from loadtest.load import send
from testing.random_store import random_store, tokenizer_json, words

SEATS = 32  # sequences of different tenants in a step
CANCELS = 10  # in each round
CANCEL_MS = 100.0  # that a cancelled answer may keep its room, beyond two steps


class Dedicated:
    """A whole model for each tenant, in memory or in a file. All are the same file, which stays in the page cache."""

    def __init__(self, whole: Model, resident: int) -> None:
        self._whole = whole
        self._path = whole.folder / "dedicated.safetensors"
        self._resident = resident
        self._loaded: OrderedDict[int, Bench] = OrderedDict()  # the tenant that was asked last is at the end
        self.loads = 0
        save_file(whole.upper.state_dict(), self._path)

    def of(self, tenant: int) -> Bench:
        """Returns the tenant's model. It may take the place of the one that nobody has asked for the longest time."""
        bench = self._loaded.pop(tenant, None)
        if bench is None:
            while len(self._loaded) >= self._resident:
                self._loaded.popitem(last=False)
            model = copy(self._whole)
            model.upper = UpperStack(model.config)
            model.upper.load_state_dict(load_file(self._path), assign=True)
            bench = Bench(model, seats=1, tokens=model.config.positions)
            self.loads += 1
        self._loaded[tenant] = bench
        return bench


def swapped(case: GenerateBench, whole: Model, half: Model) -> dict:
    """Requests of many tenants: an hGPT with their LoRAs, and whole models of which few are in memory."""
    sources = half.tenants(case.dedicated, rank=4)
    prompts, lengths = prompts_of(case, SEATS, 16), lengths_of(SEATS)
    chance = np.random.default_rng(0)
    bench, models = Bench(half, SEATS), Dedicated(whole, case.resident)

    def ours() -> float:
        for prompt, length in zip(prompts, lengths, strict=True):
            bench.ask(prompt, length, sources[int(chance.integers(case.dedicated))])
        return sum(lengths) / bench.run()

    def theirs() -> float:
        start = time.perf_counter()
        for prompt, length in zip(prompts, lengths, strict=True):
            own = models.of(int(chance.integers(case.dedicated)))
            own.ask(prompt, length)
            own.run()
        return sum(lengths) / (time.perf_counter() - start)

    found = in_turn({"hgpt": ours, "dedicated": theirs}, case.rounds)
    return {
        "swapped_ratio": round(found["hgpt"] / found["dedicated"], 3),
        "swapped_loads": round(models.loads / (SEATS * (case.rounds + 1)), 3),
    }


def served(case: GenerateBench, whole: Model, half: Model) -> dict:
    """Streams from a real server, and the same loop alone: an hGPT with weights of the same shape."""
    count = case.prompts
    ids, lengths = prompts_of(case, count * (case.rounds + 1), 16), lengths_of(count)
    vocabulary = words(case.vocabulary)
    prompts = [" ".join(vocabulary[number % len(vocabulary)] for number in prompt) for prompt in ids]
    bench = Bench(half, count)

    def bare() -> float:
        for prompt, length in zip(ids[:count], lengths, strict=True):
            bench.ask(prompt, length)
        return sum(lengths) / bench.run()

    tenant = TenantFile("bench", 1, "root", 1, "generate", [], 0)
    options = ServingOptions(dtype="fp32", seats=count, cache_tokens=bench.running.cache.space.tokens)
    with _serving(half, [tenant], options) as (server, backbone):

        def streamed() -> float:
            new = [prompts.pop() for _ in lengths]  # a server computes a prompt only once
            return send(TextStreams(server.grpc_url, backbone, tenant.id, list(zip(new, lengths, strict=True))))[0]

        found = in_turn({"bare": bare, "served": streamed}, case.rounds)
    return {
        "served_tokens_s": round(found["served"], 1),
        "served_over_bare": round(found["served"] / found["bare"], 3),
    }


def cancelled(case: GenerateBench, whole: Model, half: Model) -> dict:
    """Measures how long a stream that was cancelled over gRPC keeps its room in the cache and its slots.

    The server has room for one sequence, and one slot. Another tenant's request waits for both, and the first token of its
    answer shows that they are free. So the time has that token's own step in it, and the way to the client.
    """
    tenants = [TenantFile(name, 1, "root", 1, "generate", [], 4, "lora", ("query", "value")) for name in ("first", "second")]
    options = ServingOptions(dtype="fp32", seats=1, cache_tokens=half.config.positions, admission=False)
    with _serving(half, tenants, options) as (server, backbone):
        most = half.config.positions - 64  # tokens of the cancelled answer: more than anybody waits for
        (times,) = send(Cancelling(server.grpc_url, backbone, "first", "second", most, CANCELS * case.rounds))
    return {
        "cancel_ms": round(times.cancel_ms, 1),
        "cancel_bound_ms": round(2 * times.token_ms + CANCEL_MS, 1),
    }


@contextmanager
def _serving(
    model: Model, tenants: Sequence[TenantFile], options: ServingOptions
) -> Generator[tuple[TritonServer, str], None, None]:
    """Serves random weights of the model's shape, and yields the server and the name of the decoder."""
    with tempfile.TemporaryDirectory(prefix="hplm-bench-") as folder:
        store = random_store(Path(folder) / "store", model.config, tenants, tokenizer=tokenizer_json)
        backbone = export(store, Path(folder) / "repository", options).backbone
        with TritonServer(Path(folder) / "repository") as server:
            yield server, backbone
