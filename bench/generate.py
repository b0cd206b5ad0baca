"""`hplm bench generate`: decoders that generate text, beside transformers and whole models.

A whole model has its embedding as its table. An hGPT has fewer upper layers, and a table of n-grams. Weights are random.
Variants take turns. Only the parts `served` and `rates` ask servers.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle, pairwise, product, repeat
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, get_args

import numpy as np
import torch

from bench.rows import ONLY_QUICK, Row, Rows, Seconds, Whole, benchmark, rows_of_rounds
from bench.server import multiply, random_export, tenant_id, texts_of
from bench.turns import in_turn
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
from hplm.server import TritonServer
from hplm.simulate.arrivals import SECOND, Stream
from hplm.tenants.snapshot import Tenant
from hplm_client import HplmClient
from loadtest.encode import http_request
from loadtest.generator import Load
from loadtest.load import send
from loadtest.traffic import answer_lengths

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
SOME_TENANTS, SHARES = 100, (0.5, 0.8, 1.2)  # between one tenant and all; of the whole model's capacity
TEXTS = 1024  # different prompts, sent in turn
LEAST_ARRIVALS, MOST_CONNECTIONS = 2, 256
STEP_TOKENS, CACHE_TOKENS, KEPT_BYTES = 256, 16_384, 256 * 10**6
OPTIONS, RANK = ServingOptions(dtype="fp32", device="cpu"), 4  # of a server, and of tenants' LoRAs
SHAPES = {"smollm2": (49_152, 576, 9, 1536, 3), "toy": (512, 64, 4, 128, 2)}  # vocabulary, hidden, heads, inner, heads of keys

Part = Literal["transformers", "halves", "tenants", "cleaning", "served", "rates"]


QUICK_PARTS = tuple(part for part in get_args(Part) if part != "transformers")


@benchmark(size="toy", layers=3, tenants=100, clients=4, rounds=1, seconds=0.3, parts=QUICK_PARTS)
def generate(
    *,
    parts: tuple[Part, ...] = get_args(Part),
    size: Annotated[Literal["smollm2", "toy"], ONLY_QUICK] = "smollm2",
    layers: Annotated[int, ONLY_QUICK] = 30,
    tenants: Annotated[int, ONLY_QUICK] = 10_000,
    clients: Annotated[int, ONLY_QUICK] = 32,
    rounds: Whole = 3,
    seconds: Seconds = 30.0,
) -> Rows:
    """Generates with random weights of SmolLM2-135M's shape: whole models and hGPTs, one and many streams and tenants.

    The first third of the layers is in the table of an hGPT. `served` is an hGPT on the CPU: how long one client waits for its
    first token and for each other one, beside the bare model; and the longest gap between tokens of four streams, alone and
    while a prompt of 3,000 tokens is read. `rates` is the whole model and an hGPT, each on a server with LoRAs of up to 10,000
    tenants: tokens a second of 32 clients by the tenants that they ask, and how long whole answers take when prompts arrive as
    a Poisson process at shares of the whole model's capacity. The hGPT knows its windows. `cleaning`: batches that wait for
    their longest answer, beside sequences that leave at once. Locust's scenario `Chat` asks other servers.

    :param parts: which to measure
    :param rounds: of each part
    :param seconds: of each load of `rates`
    """
    whole, half = (config_of(size, layers, lower) for lower in (0, layers // 3))
    if "transformers" in parts:
        yield from _transformers(whole, rounds)
    if "halves" in parts:
        yield from _halves(whole, half, rounds)
    if "tenants" in parts:
        yield from _tenants(half, tenants, rounds)
    if "cleaning" in parts:
        yield from _cleaning(half, rounds)
    if "served" in parts:
        yield from _served(half, rounds)
    if "rates" in parts:
        yield from _rates({"full": whole, "hgpt": half}, tenants, clients, rounds, seconds)


def config_of(size: str, layers: int, lower: int) -> BackboneConfig:
    """`size`: one of `SHAPES`. `lower`: those of the layers that the table replaces."""
    vocabulary, hidden, heads, inner, kv_heads = SHAPES[size]
    return BackboneConfig(
        size, vocabulary, hidden, heads, inner, lower, layers - lower, 4096, 0, "silu", 1e-5, UNUSED, UNUSED, UNUSED,
        UNUSED, Window(3 if lower else 1, causal=True), kv_heads=kv_heads, norm=RMS, pre_norm=True, biases=False,
        gated=True, rotary_base=100_000.0, start_id=START,
    )  # fmt: skip


def _transformers(config: BackboneConfig, rounds: int) -> Rows:
    """The whole model on our engine, and one of the same shape with `transformers.generate`."""
    other = _of_transformers(config)
    prompts, lengths = prompts_of(config, PROMPTS, PROMPT_TOKENS), {PROMPTS: answer_lengths(PROMPTS), 1: [64]}
    inputs = torch.tensor([[START, *prompt] for prompt in prompts])

    @torch.inference_mode()
    def theirs(count: int) -> float:
        some, most, start = inputs[:count], max(lengths[count]), time.perf_counter()
        other.generate(some, attention_mask=torch.ones_like(some), max_new_tokens=most, do_sample=False)
        return sum(lengths[count]) / (time.perf_counter() - start)

    ways = {f"theirs {count}": partial(theirs, count) for count in lengths}
    with random_export(config, 1, OPTIONS, RANK) as folder:
        ways |= {f"ours {count}": partial(Bench(folder, count).answer, prompts, own) for count, own in lengths.items()}
        found = in_turn(ways, rounds)
    for name, count, least in (("full", PROMPTS, 2.0), ("one_stream", 1, 1.1)):
        yield Row(f"{name}_tokens_s", found[f"ours {count}"], "tokens/s")
        yield Row(f"{name}_over_transformers", found[f"ours {count}"] / found[f"theirs {count}"], least=least)


def _of_transformers(config: BackboneConfig) -> Any:  # its own types do not fit its own methods
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocabulary, hidden_size=config.hidden, intermediate_size=config.intermediate,
            num_hidden_layers=config.upper_layers, num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.positions, rms_norm_eps=config.norm_eps, bos_token_id=START, eos_token_id=None,
            pad_token_id=0, rope_parameters={"rope_type": "default", "rope_theta": config.rotary_base},
        )
    ).eval()  # fmt: skip


def _halves(whole: BackboneConfig, half: BackboneConfig, rounds: int) -> Rows:
    """An hGPT and the whole model on the same engine. From the second round on, all windows of the hGPT are known.

    `missing`: one that computes each window, and keeps none.
    """

    def decode(bench: Bench) -> float:
        """Returns the tokens a second behind the prompts."""
        for prompt in prompts_of(half, 16, 8):
            bench.ask(prompt, 48)
        for _ in range(2):
            bench.loop.step()
        return 16 * 46 / bench.run()

    with random_export(whole, 1, OPTIONS, RANK) as full, random_export(half, 1, OPTIONS, RANK) as hgpt:
        benches = {"full": Bench(full), "hgpt": Bench(hgpt), "missing": Bench(hgpt, kept_bytes=0)}
        found = in_turn({name: partial(decode, bench) for name, bench in benches.items()}, rounds)
    bound = benches["full"].weights / benches["hgpt"].weights
    yield Row("decode_ratio", found["hgpt"] / found["full"], least=NEAR * bound)
    yield Row("decode_missing_ratio", found["missing"] / found["full"])
    yield Row("decode_bound", bound)


def _tenants(config: BackboneConfig, tenants: int, rounds: int) -> Rows:
    """32 sequences at a time, each of another tenant: of all tenants or of 32."""
    chance = np.random.default_rng(0)
    drawn = {pool: cycle(chance.permutation(pool).tolist()) for pool in (tenants, SHARING)}  # those of a step differ
    prompts, lengths = prompts_of(config, 2 * SHARING, 16), answer_lengths(2 * SHARING)
    with random_export(config, 1, OPTIONS, RANK) as folder:
        known, bench = multiply(folder / "1", tenants).tenants, Bench(folder, SHARING)

        def serve(pool: int) -> float:
            return bench.answer(prompts, lengths, (known[number] for number in drawn[pool]))

        many, some = in_turn({f"{pool} tenants": partial(serve, pool) for pool in drawn}, rounds).values()
    yield Row(f"tenants_{tenants}_over_{SHARING}", many / some, least=0.92)


def _cleaning(config: BackboneConfig, rounds: int) -> Rows:
    """Batches whose sequences all stay until the longest ends, or leave at once; and others that start in their place."""
    lengths = answer_lengths(2 * PROMPTS)
    prompts = prompts_of(config, len(lengths), PROMPT_TOKENS)
    batches = [slice(at, at + PROMPTS) for at in range(0, len(lengths), PROMPTS)]

    def answer(batches: Sequence[slice], stay: bool = False) -> float:
        start = time.perf_counter()
        for batch in batches:
            own = lengths[batch]
            bench.answer(prompts[batch], [max(own)] * len(own) if stay else own)
        return sum(lengths) / (time.perf_counter() - start)

    with random_export(config, 1, OPTIONS, RANK) as folder:
        bench = Bench(folder, PROMPTS)
        ways = {"stay": partial(answer, batches, stay=True), "leave": partial(answer, batches)}
        found = in_turn(ways | {"replaced": partial(answer, [slice(None)])}, rounds)
    yield Row("batch_tokens_s", found["stay"], "tokens/s")
    yield Row("early_cleaning", found["leave"] / found["stay"])
    yield Row("early_cleaning_replaced", found["replaced"] / found["stay"])


def _served(config: BackboneConfig, rounds: int) -> Rows:
    """An hGPT on a server: one client beside the bare model, and streams beside a long prompt."""
    tenants = 1 + STREAMS
    lengths = [count + 2 for count in (PROMPT_TOKENS,) * tenants + (LONG_TOKENS,)]  # a text has two tokens more, a prompt none
    with (
        random_export(config, tenants, OPTIONS, RANK) as folder,
        TritonServer(folder.parent) as server,
        HplmClient(server.http_url, backbone=folder.name, network_timeout=LIMIT_S) as client,
    ):
        bench, texts = Bench(folder, 1), texts_of(config, lengths * (rounds + 1))  # a server computes no prompt twice
        parts = [texts[at : at + len(lengths)] for at in range(0, len(texts), len(lengths))]
        _, *found = [_one_client(client, bench, part[0]) | _gaps(client, part[1:]) for part in parts]  # the first warms up
    yield from rows_of_rounds(found)


def _one_client(client: HplmClient, bench: Bench, text: str) -> dict[str, float]:
    start = time.perf_counter()
    first, *others = np.diff([start, *_tokens(client, 0, text, ANSWER_TOKENS)]).tolist()
    bench.decoder.took.clear()
    bench.answer(prompts_of(bench.config, 1, PROMPT_TOKENS), [ANSWER_TOKENS])
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


Ask = Callable[..., dict[str, float]]


def _rates(configs: Mapping[str, BackboneConfig], tenants: int, clients: int, rounds: int, seconds: float) -> Rows:
    """Servers take turns, asked by clients for more and more tenants, and then by arrivals for all tenants."""
    counts, found, full = sorted({1, SOME_TENANTS, tenants}), list[dict[str, float]](), 0.0
    with ExitStack() as stack:
        ask = {name: stack.enter_context(_asked(name, own, tenants, clients, seconds)) for name, own in configs.items()}
        for turn in range(rounds + 1):
            own = {f"tenants/{count}/{name}": ask[name](count) for count, name in product(counts, ask)}
            if not turn:  # it warms up, and makes windows known
                full = own[f"tenants/{tenants}/full"]["tokens_s"]
                continue
            own |= {f"rates/{share}/{name}": ask[name](tenants, share * full) for share, name in product(SHARES, ask)}
            one, many = ({name: own[f"tenants/{count}/{name}"]["tokens_s"] for name in ask} for count in (1, tenants))
            ratios = {"hgpt_over_full": many["hgpt"] / many["full"], "hgpt_many_over_one": many["hgpt"] / one["hgpt"]}
            found.append({f"{of}/{figure}": value for of, some in own.items() for figure, value in some.items()} | ratios)
    yield from rows_of_rounds(found)


@contextmanager
def _asked(name: str, config: BackboneConfig, tenants: int, clients: int, seconds: float) -> Iterator[Ask]:
    """Serves a decoder. Gives what sends prompts for the first so many tenants: by clients, or for so many tokens a second."""
    texts, lengths = texts_of(config, [PROMPT_TOKENS + 2] * TEXTS), np.array(answer_lengths(TEXTS))

    def ask(count: int, tokens_s: float | None = None) -> dict[str, float]:
        whose = map(tenant_id, np.random.default_rng(0).integers(count, size=TEXTS).tolist())
        requests = [_request(name, *given) for given in zip(texts, whose, lengths.tolist(), strict=True)]
        load = Load(server.http_url, requests, seconds, connections=clients, patience=LIMIT_S)
        if tokens_s is not None:
            rate = tokens_s / float(lengths.mean())
            due = Stream(rate, max(seconds, LEAST_ARRIVALS / rate)).draw(seed=0).at_ns / SECOND
            load = replace(load, arrivals=due, seconds=due[-1] + 1.0, connections=MOST_CONNECTIONS)
        (report,) = send(load)
        report.expect_success(name)
        speed = {"tokens_s": float(lengths[report.numbers % TEXTS].sum()) / report.wall_s}
        return speed | {f"p{percent}_ms": report.percentile_ms(percent) for percent in (50, 99)}

    with random_export(replace(config, name=name), 1, OPTIONS, RANK) as folder:
        multiply(folder / "1", tenants).save(folder / "1" / Backbone.TENANTS)
        with TritonServer(folder.parent) as server:
            yield ask


def _request(model: str, text: str, tenant: str, tokens: int) -> bytes:
    given = {"text_input": text, "tenant": tenant, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return http_request(f"/v2/models/{model}/generate", json.dumps(given).encode())


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
        request = DecoderRequest(
            PinnedTenant(id, uid, 1, chain, adapter),
            ids,
            sampling,
            _take,
            _decode,
            arrival_ns=time.monotonic_ns(),
            seed=0,
        )
        self.loop.enqueue(request)

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
