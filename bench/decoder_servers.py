"""The parts of `hplm bench generate` that ask servers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise, product
from statistics import median

import numpy as np

from bench.decoder import OPTIONS, PROMPT_TOKENS, RANK, Bench, prompts_of
from bench.rows import Rows, rows_of_rounds
from bench.server import multiply, random_export, tenant_id, texts_of
from hplm.engine.backbone import Backbone
from hplm.model.config import BackboneConfig
from hplm.server import TritonServer
from hplm.simulate.arrivals import SECOND, Stream
from hplm_client import HplmClient
from loadtest.encode import http_request
from loadtest.generator import Load
from loadtest.load import send
from loadtest.traffic import answer_lengths

ANSWER_TOKENS = 64  # of one client
STREAMS, STREAM_TOKENS = 4, 1500
SETTLED, ALONE = 8, 64  # tokens of each stream before its gaps count, and before the long prompt comes
LONG_TOKENS = 3000
LIMIT_S = 600.0  # that a client waits for a token
SOME_TENANTS, SHARES = 100, (0.5, 0.8, 1.2)  # between one tenant and all; of the whole model's capacity
TEXTS = 1024  # different prompts, sent in turn
LEAST_ARRIVALS, MOST_CONNECTIONS = 2, 256


def served(config: BackboneConfig, rounds: int) -> Rows:
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


def rates(configs: Mapping[str, BackboneConfig], tenants: int, clients: int, rounds: int, seconds: float) -> Rows:
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
