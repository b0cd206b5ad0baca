"""`hplm bench generate`: decoders that generate text, beside transformers and whole models.

A whole model has its embedding as its table. An hGPT has fewer upper layers, and a table of n-grams. Weights are random.
Variants take turns. Only the parts `served` and `rates` ask servers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import cycle
from typing import Annotated, Any, Literal, get_args

import numpy as np
import torch

from bench.decoder import OPTIONS, PROMPT_TOKENS, RANK, START, Bench, config_of, prompts_of
from bench.decoder_servers import rates, served
from bench.rows import ONLY_QUICK, Row, Rows, Seconds, Whole, benchmark
from bench.server import multiply, random_export
from bench.turns import in_turn
from hplm.model.config import BackboneConfig
from loadtest.traffic import answer_lengths

PROMPTS = 16
SHARING = 32  # sequences of a step in which tenants are mixed
NEAR = 0.9  # of a bound

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
    measured = {
        "transformers": partial(_transformers, whole, rounds), "halves": partial(_halves, whole, half, rounds),
        "tenants": partial(_tenants, half, tenants, rounds), "cleaning": partial(_cleaning, half, rounds),
        "served": partial(served, half, rounds),
        "rates": partial(rates, {"full": whole, "hgpt": half}, tenants, clients, rounds, seconds),
    }  # fmt: skip
    for part in parts:
        yield from measured[part]()


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
