"""`hplm bench generate`: decoders that generate text, beside transformers and whole models.

A whole model has its embedding as its table. An hGPT has fewer upper layers, and a table of n-grams. Weights are random.
Variants take turns. Only the part `served` asks a server.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import cycle, pairwise, repeat
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

import numpy as np
import torch
from tqdm import tqdm

from bench.rows import Row, Rows, Whole, benchmark, rows_of_rounds
from bench.server import random_export, tenant_id, texts_of
from builder.publish.model_configs import ServingOptions
from hplm.adapters import records
from hplm.adapters.layout import adapter_layout
from hplm.errors import HplmError
from hplm.generation.cache import Cache
from hplm.generation.decoder import Decoder
from hplm.generation.loop import Loop
from hplm.generation.queue import SequenceQueue
from hplm.generation.request import Piece, Request, Source
from hplm.generation.running import Running
from hplm.generation.sampling import Sampling
from hplm.generation.staging import Staged, Stager
from hplm.model.checkpoint import split
from hplm.model.config import RMS, UNUSED, BackboneConfig
from hplm.model.families import FAMILIES
from hplm.model.original import Checkpoint
from hplm.model.stacks import UpperStack
from hplm.model.windows import Window
from hplm.plot.forest import Forest, assign_addresses
from hplm.plot.table import TableSpec
from hplm.plot.writing import write_table
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import policy
from hplm.server import TritonServer
from hplm_client import HplmClient
from loadtest.traffic import answer_lengths
from testing.random_store import random_values

CPU = torch.device("cpu")
START = 1
PROMPTS, PROMPT_TOKENS = 16, 64
SHARING = 32  # sequences of a step in which tenants are mixed
ANSWER_TOKENS = 64  # of one client
STREAMS, STREAM_TOKENS = 4, 1500
SETTLED, ALONE = 8, 64  # tokens of each stream before its gaps count, and before the long prompt comes
LONG_TOKENS = 3000
LIMIT_S = 600.0  # that a client waits for a token
NEAR = 0.9  # of a bound
STEP_TOKENS, CACHE_TOKENS = 256, 16_384
GRAMS = 100_000  # of the table of an hGPT
RANK = 4
SHAPES = {"smollm2": (49_152, 576, 9, 1536, 3), "toy": (512, 64, 4, 128, 2)}  # vocabulary, hidden, heads, inner, heads of keys

Part = Literal["transformers", "halves", "tenants", "served"]


@benchmark(size="toy", layers=3, tenants=100, rounds=1, parts=("halves", "tenants", "served"))
def generate(
    *,
    parts: tuple[Part, ...] = get_args(Part),
    size: Literal["smollm2", "toy"] = "smollm2",
    layers: Whole = 30,
    tenants: Whole = 10_000,
    rounds: Whole = 3,
) -> Rows:
    """Generates with random weights of SmolLM2-135M's shape: whole models and hGPTs, one and many streams and tenants.

    The first third of the layers is in the table of an hGPT. `served` is an hGPT on the CPU: how long one client waits for its
    first token and for each other one, beside the bare model; and the longest gap between tokens of four streams, alone and
    while a prompt of 3,000 tokens is read. Locust's scenario `Chat` asks other servers.

    :param parts: which to measure
    :param size: of a layer
    :param layers: of the model
    :param tenants: of the part `tenants`, beside 32
    :param rounds: of each part
    """
    with tempfile.TemporaryDirectory(prefix="hplm-bench-") as scratch:
        whole, half = (Model(Path(scratch), size, layers, lower) for lower in (0, layers // 3))
        if "transformers" in parts:
            yield from _transformers(whole, half, rounds)
        if "halves" in parts:
            yield from _halves(whole, half, rounds)
        if "tenants" in parts:
            yield from _tenants(half, max(tenants, SHARING), rounds)
        if "served" in parts:
            yield from _served(half, rounds)


def _transformers(whole: Model, half: Model, rounds: int) -> Rows:
    """The whole model on our engine, and the same weights with `transformers.generate`."""
    other = _of_transformers(whole)
    prompts, lengths = prompts_of(half, PROMPTS, PROMPT_TOKENS), {PROMPTS: answer_lengths(PROMPTS), 1: [64]}
    inputs = torch.tensor([[START, *prompt] for prompt in prompts])
    benches = {count: Bench(whole, count) for count in lengths}

    def ours(count: int) -> float:
        return benches[count].answer(prompts, lengths[count], repeat(None))

    @torch.inference_mode()
    def theirs(count: int) -> float:
        some, most, start = inputs[:count], max(lengths[count]), time.perf_counter()
        other.generate(some, attention_mask=torch.ones_like(some), max_new_tokens=most, do_sample=False)
        return sum(lengths[count]) / (time.perf_counter() - start)

    ways = {f"{name} {count}": partial(way, count) for count in lengths for name, way in (("ours", ours), ("theirs", theirs))}
    found = in_turn(ways, rounds)
    for name, count, least in (("full", PROMPTS, 2.0), ("one_stream", 1, 1.1)):
        yield Row(f"{name}_tokens_s", found[f"ours {count}"], "tokens/s")
        yield Row(f"{name}_over_transformers", found[f"ours {count}"] / found[f"theirs {count}"], least=least)


def _of_transformers(model: Model) -> Any:  # its own types do not fit its own methods
    """Returns a decoder of `transformers`. The upper layers of `model` get its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = model.config
    other = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocabulary, hidden_size=config.hidden, intermediate_size=config.intermediate,
            num_hidden_layers=config.upper_layers, num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.positions, rms_norm_eps=config.norm_eps, bos_token_id=START, eos_token_id=None,
            pad_token_id=0, rope_parameters={"rope_type": "default", "rope_theta": config.rotary_base},
        )
    ).eval()  # fmt: skip
    layers = config.upper_layers
    weights = FAMILIES["llama"].names.ours(other.state_dict(), layers)
    weights["next_token.weight"] = other.lm_head.weight.detach()
    _, model.upper = split(Checkpoint(config, layers, weights, tokenizer_json=""))
    return other


def _halves(whole: Model, half: Model, rounds: int) -> Rows:
    """An hGPT and the whole model on the same engine."""

    def decode(bench: Bench) -> float:
        """Returns the tokens a second behind the prompts."""
        for prompt in prompts_of(half, 16, 8):
            bench.ask(prompt, 48)
        for _ in range(2):
            bench.loop.step()
        return 16 * 46 / bench.run()

    benches = {"full": Bench(whole), "hgpt": Bench(half)}
    found = in_turn({name: partial(decode, bench) for name, bench in benches.items()}, rounds)
    full, hgpt = (sum(weight.numel() for weight in model.upper.parameters()) for model in (whole, half))
    yield Row("decode_ratio", found["hgpt"] / found["full"], least=NEAR * full / hgpt)
    yield Row("decode_bound", full / hgpt)


def _tenants(model: Model, tenants: int, rounds: int) -> Rows:
    """32 sequences at a time, each of another tenant: of all tenants or of 32."""
    sources = model.tenants(tenants)
    chance = np.random.default_rng(0)
    drawn = {pool: cycle(chance.permutation(pool).tolist()) for pool in (tenants, SHARING)}  # those of a step differ
    prompts, lengths = prompts_of(model, 2 * SHARING, 16), answer_lengths(2 * SHARING)
    bench = Bench(model, SHARING)

    def serve(pool: int) -> float:
        return bench.answer(prompts, lengths, (sources[number] for number in drawn[pool]))

    many, some = in_turn({f"{pool} tenants": partial(serve, pool) for pool in drawn}, rounds).values()
    yield Row(f"tenants_{tenants}_over_{SHARING}", many / some, least=0.92)


def _served(model: Model, rounds: int) -> Rows:
    """An hGPT on a server: one client beside the bare model, and streams beside a long prompt."""
    bench, tenants = Bench(model, 1), 1 + STREAMS
    lengths = [count + 2 for count in (PROMPT_TOKENS,) * tenants + (LONG_TOKENS,)]  # a text has two tokens more, a prompt none
    options = ServingOptions(dtype="fp32", device="cpu")
    with (
        random_export(model.config, tenants, options) as folder,
        TritonServer(folder.parent) as server,
        HplmClient(server.http_url, backbone=folder.name, network_timeout=LIMIT_S) as client,
    ):
        texts = texts_of(model.config, lengths * (rounds + 1))  # a server computes no prompt twice
        parts = [texts[at : at + len(lengths)] for at in range(0, len(texts), len(lengths))]
        _, *found = [_one_client(client, bench, part[0]) | _gaps(client, part[1:]) for part in parts]  # the first warms up
    yield from rows_of_rounds(found)


def _one_client(client: HplmClient, bench: Bench, text: str) -> dict[str, float]:
    start = time.perf_counter()
    first, *others = np.diff([start, *_tokens(client, 0, text, ANSWER_TOKENS)]).tolist()
    bench.decoder.took.clear()
    bench.answer(prompts_of(bench.model, 1, PROMPT_TOKENS), [ANSWER_TOKENS], repeat(None))
    bare_first, *bare_others = bench.decoder.took
    found: dict[str, float] = {}
    for name, whole, bare in (("first_token", first, bare_first), ("token", median(others), median(bare_others))):
        found |= {f"{name}_ms": 1e3 * whole, f"bare_{name}_ms": 1e3 * bare, f"{name}_outside_ms": 1e3 * (whole - bare)}
    return found


def _gaps(client: HplmClient, texts: Sequence[str]) -> dict[str, float]:
    """Returns the longest gaps between tokens of running streams, before the last text comes and while it is read."""
    *prompts, long = texts
    times: list[list[float]] = [[] for _ in prompts]
    read = threading.Event()

    def stream(number: int) -> None:
        for now in _tokens(client, number + 1, prompts[number], STREAM_TOKENS):
            times[number].append(now)
            if read.is_set():
                return

    with ThreadPoolExecutor(STREAMS) as pool:
        streams = [pool.submit(stream, number) for number in range(STREAMS)]
        while min(map(len, times)) < ALONE and not any(one.done() for one in streams):
            time.sleep(0.01)
        begin = time.perf_counter()
        (end,) = _tokens(client, 0, long, 1)
        read.set()
    for one in streams:
        one.result()  # raises if it failed
    gaps = [gap for own in times for gap in pairwise(own[SETTLED:])]
    alone, beside = [late - early for early, late in gaps if late < begin], [b - a for a, b in gaps if b > begin and a < end]
    found = {"gap_alone_ms": max(alone), "gap_beside_prompt_ms": max(beside), "long_first_token_ms": end - begin}
    return {name: 1e3 * seconds for name, seconds in found.items()} | {"gap_over_alone": max(beside) / max(alone)}


def _tokens(client: HplmClient, tenant: int, text: str, count: int) -> Iterator[float]:
    """Yields when each token of an answer comes."""
    who = tenant_id(tenant, 1 + STREAMS)
    for _ in client.stream(text, tenant=who, max_tokens=count, temperature=0, ignore_eos=True):
        yield time.perf_counter()


class Model:
    """A decoder with random weights, and its table."""

    def __init__(self, folder: Path, size: str, layers: int, lower: int) -> None:
        """`size`: one of `SHAPES`. `lower`: those of the layers that the table replaces."""
        vocabulary, hidden, heads, inner, kv_heads = SHAPES[size]
        self.config = config = BackboneConfig(
            size, vocabulary, hidden, heads, inner, lower, layers - lower, 4096, 0, "silu", 1e-5, UNUSED, UNUSED, UNUSED,
            UNUSED, Window(3 if lower else 1, causal=True), kv_heads=kv_heads, norm=RMS, pre_norm=True, biases=False,
            gated=True, rotary_base=100_000.0, start_id=START,
        )  # fmt: skip
        torch.manual_seed(lower)
        self.upper = UpperStack(config)
        spec = TableSpec(
            domain="root", version=1, parent=None, parent_version=None, n=config.window.n, causal=True,
            vocabulary=config.vocabulary, hidden=config.hidden, dtype="fp16", corpus_tokens=0,
        )  # fmt: skip
        keys = spec.space.unigrams()
        if lower:
            grams = np.random.default_rng(0).integers(1, config.vocabulary + 1, (GRAMS, config.window.n))
            keys = np.concatenate([keys, np.unique(spec.space.pack(grams), axis=0)])
        table = write_table(folder / f"{lower}" / "root" / "1", spec, keys, random_values(spec, 0))
        self.forest = Forest([folder / f"{lower}"], assign_addresses([table]))
        self.source = Source("bench", 1, 1, self.forest.chain("root", 1))
        self.folder = folder

    def tenants(self, count: int) -> list[Source]:
        """Returns tenants with LoRAs of their own."""
        layout = adapter_layout(self.config, "lora", RANK, ("query", "value"))
        assert layout is not None
        pool = torch.randn(layout.layers * layout.layer_size + 8 * count) * 0.02
        size = layout.layers * layout.layer_size
        flat = (pool[8 * i : 8 * i + size].view(layout.layers, -1) for i in range(count))
        made = [records.write(self.folder, records.pack({"adapter": (layout, layout.unpack(one))}))["adapter"] for one in flat]
        return [replace(self.source, uid=i, adapter=record) for i, record in enumerate(made)]


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
    """A loop that one thread drives."""

    def __init__(self, model: Model, seats: int = 16) -> None:
        config = model.config
        self.model = model
        cache = Cache(CACHE_TOKENS, config.positions, config.upper_layers, config.key_width, CPU)
        self.stager = Stager(config, lambda: model.forest, set, records.Records(model.folder), cache, seats)
        self.decoder = TimedDecoder(model.upper, CPU, torch.float32)
        self.running = Running(cache, seats, STEP_TOKENS, finished=0)  # rounds have the same prompts
        self.queue = SequenceQueue(policy("timely"), Limits(100_000, 10**10), self.running, False)
        self.loop = Loop(self.queue, self.stager, self.decoder, ())

    def ask(self, prompt: Sequence[int], count: int, source: Source | None = None) -> None:
        source = source or self.model.source
        ids = [START, *prompt]
        addresses = source.chain.lookup(np.array(ids), np.array([len(ids)])).addresses
        sampling = Sampling(temperature=0, max_tokens=count, logprobs=None)
        request = Request(source, ids, addresses, sampling, _take, _decode, arrival_ns=time.monotonic_ns(), seed=0)
        self.loop.offer(request)

    def answer(self, prompts: Sequence[Sequence[int]], counts: Sequence[int], sources: Iterable[Source | None]) -> float:
        """Answers prompts with so many tokens each. Returns the tokens a second."""
        for prompt, count, source in zip(prompts, counts, sources, strict=False):
            self.ask(prompt, count, source)
        return sum(counts) / self.run()

    def run(self) -> float:
        """Answers all requests. Returns how long it took."""
        start = time.perf_counter()
        while self.loop.step() or len(self.running) or len(self.queue):
            pass
        return time.perf_counter() - start


def _take(piece: Piece | HplmError) -> None:
    if isinstance(piece, HplmError):
        raise piece


def _decode(ids: Sequence[int]) -> str:
    """Turns each token into a character. Tokenizers differ, and none is measured here."""
    return "".join(chr(0x4E00 + id % 20_000) for id in ids)


def prompts_of(model: Model, count: int, tokens: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(2, model.config.vocabulary, (count, tokens)).tolist()


def in_turn(variants: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Returns the median of what each variant returns. The first round warms up."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for turn in tqdm(range(rounds + 1), desc=" and ".join(variants)):
        for name, variant in variants.items():
            value = variant()
            if turn:
                found[name].append(value)
    return {name: median(values) for name, values in found.items()}
