"""`hplm bench generate`: decoders that generate text, beside transformers and whole models.

A whole model has its embedding as its table. An hGPT has fewer upper layers, and a table of n-grams. Weights are random.
Variants take turns, and each figure is a ratio of medians from one run, without a server.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle, repeat
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from bench.decoders import START, Bench, Model, in_turn, lengths_of, prompts_of
from bench.rows import Row, Rows, Whole, benchmark
from hplm.model.decoders import split_decoder
from hplm.model.families import FAMILIES
from hplm.model.original import Checkpoint

PROMPTS, PROMPT_TOKENS = 16, 64
SHARING = 32  # sequences of a step in which tenants are mixed
NEAR = 0.9  # of a bound

Part = Literal["transformers", "halves", "tenants"]


@dataclass(frozen=True)
class Case:
    whole: Model
    half: Model
    tenants: int
    rounds: int


@benchmark(size="toy", layers=3, tenants=100, rounds=1, parts=("halves", "tenants"))
def generate(
    *,
    parts: tuple[Part, ...] = get_args(Part),
    size: Literal["smollm2", "toy"] = "smollm2",
    layers: Whole = 30,
    tenants: Whole = 10_000,
    rounds: Whole = 3,
) -> Rows:
    """Generates with random weights of SmolLM2-135M's shape: whole models and hGPTs, one and many streams and tenants.

    The first third of the layers is in the table of an hGPT. Nothing is served: Locust's scenario `Chat` asks servers.

    :param parts: which to measure
    :param size: of a layer
    :param layers: of the model
    :param tenants: of the part `tenants`, beside 32
    :param rounds: of each part
    """
    with tempfile.TemporaryDirectory(prefix="hplm-bench-") as scratch:
        whole, half = (Model(Path(scratch), size, layers, lower) for lower in (0, layers // 3))
        for part in parts:
            yield from PARTS[part](Case(whole, half, max(tenants, SHARING), rounds))


def _transformers(case: Case) -> Rows:
    """The whole model on our engine, and the same weights with `transformers.generate`."""
    other = _of_transformers(case.whole)
    prompts, lengths = prompts_of(case.half, PROMPTS, PROMPT_TOKENS), {PROMPTS: lengths_of(PROMPTS), 1: [64]}
    inputs = torch.tensor([[START, *prompt] for prompt in prompts])
    benches = {count: Bench(case.whole, count) for count in lengths}

    def ours(count: int) -> float:
        return benches[count].answer(prompts, lengths[count], repeat(None))

    @torch.inference_mode()
    def theirs(count: int) -> float:
        some, most, start = inputs[:count], max(lengths[count]), time.perf_counter()
        other.generate(some, attention_mask=torch.ones_like(some), max_new_tokens=most, do_sample=False)
        return sum(lengths[count]) / (time.perf_counter() - start)

    ways = {f"{name} {count}": partial(way, count) for count in lengths for name, way in (("ours", ours), ("theirs", theirs))}
    found = in_turn(ways, case.rounds)
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
    layers, next_token = config.upper_layers, other.lm_head.weight.detach()
    weights = FAMILIES["llama"].renamed(other.state_dict(), layers, next_token)
    _, model.upper = split_decoder(Checkpoint(config, layers, weights, tokenizer_json=""))
    return other


def _halves(case: Case) -> Rows:
    """An hGPT and the whole model on the same engine."""

    def decode(bench: Bench) -> float:
        """Returns the tokens a second behind the prompts."""
        for prompt in prompts_of(case.half, 16, 8):
            bench.ask(prompt, 48)
        for _ in range(2):
            bench.loop.step()
        return 16 * 46 / bench.run()

    benches = {"full": Bench(case.whole), "hgpt": Bench(case.half)}
    found = in_turn({name: partial(decode, bench) for name, bench in benches.items()}, case.rounds)
    full, hgpt = (sum(weight.numel() for weight in model.upper.parameters()) for model in (case.whole, case.half))
    yield Row("decode_ratio", found["hgpt"] / found["full"], least=NEAR * full / hgpt)
    yield Row("decode_bound", full / hgpt)


def _tenants(case: Case) -> Rows:
    """32 sequences at a time, each of another tenant: of all tenants or of 32."""
    sources = case.half.tenants(case.tenants)
    chance = np.random.default_rng(0)
    drawn = {pool: cycle(chance.permutation(pool).tolist()) for pool in (case.tenants, SHARING)}  # those of a step differ
    prompts, lengths = prompts_of(case.half, 96, 16), lengths_of(96)
    bench = Bench(case.half, SHARING)

    def serve(pool: int) -> float:
        return bench.answer(prompts, lengths, (sources[number] for number in drawn[pool]))

    many, some = in_turn({f"{pool} tenants": partial(serve, pool) for pool in drawn}, case.rounds).values()
    yield Row(f"tenants_{case.tenants}_over_{SHARING}", many / some, least=0.92)


PARTS: dict[str, Callable[[Case], Rows]] = {"transformers": _transformers, "halves": _halves, "tenants": _tenants}
