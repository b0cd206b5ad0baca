"""Measures generation with random weights of SmolLM2-135M's shape, mostly without a server.

A whole model has its embedding as its table. An hGPT has fewer upper layers, and a table of n-grams. Variants take turns, and
each figure is a ratio of medians from one run.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.measuring.decoders import MOST, START, Answered, Bench, GenerateBench, Model, in_turn, lengths_of, prompts_of
from bench.measuring.decoders_beside import cancelled, served, swapped
from hplm.errors import DeadlineMissed
from hplm.generation.promise import Promise

SHARING = 32  # sequences of a step in which tenants are mixed


def bench_generate(case: GenerateBench, parts: Sequence[str]) -> dict:
    measure = {
        "transformers": _transformers,
        "halves": _halves,
        "tenants": _tenants,
        "swapped": swapped,
        "served": served,
        "cancelled": cancelled,
        "overload": _overload,
    }
    figures: dict = {}
    with tempfile.TemporaryDirectory(prefix="hplm-bench-") as scratch:
        whole, half = (Model(Path(scratch), case, lower) for lower in (0, case.lower))
        for part in parts:
            figures |= measure[part](case, whole, half)
    return figures


def _transformers(case: GenerateBench, whole: Model, half: Model) -> dict:
    """The whole model on our engine, and the same weights with `transformers.generate`."""
    other = _as_transformers(whole)
    prompts, lengths = prompts_of(case, case.prompts, case.prompt_tokens), lengths_of(case.prompts)
    inputs = torch.tensor([[START, *prompt] for prompt in prompts])
    bench, one = Bench(whole, case.prompts), Bench(whole, 1)

    def ours() -> float:
        for prompt, length in zip(prompts, lengths, strict=True):
            bench.ask(prompt, length)
        return sum(lengths) / bench.run()

    @torch.inference_mode()
    def theirs() -> float:
        start = time.perf_counter()
        other.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=max(lengths), do_sample=False)
        return sum(lengths) / (time.perf_counter() - start)

    def our_stream() -> float:
        one.ask(prompts[0], 64)
        return 64 / one.run()

    @torch.inference_mode()
    def their_stream() -> float:
        start = time.perf_counter()
        other.generate(inputs[:1], attention_mask=torch.ones_like(inputs[:1]), max_new_tokens=64, do_sample=False)
        return 64 / (time.perf_counter() - start)

    found = in_turn({"ours": ours, "transformers": theirs, "our stream": our_stream, "their stream": their_stream}, case.rounds)
    return {
        "full_tokens_s": round(found["ours"], 1),
        "full_over_transformers": round(found["ours"] / found["transformers"], 3),
        "one_stream_tokens_s": round(found["our stream"], 1),
        "one_stream_over_transformers": round(found["our stream"] / found["their stream"], 3),
    }


def _as_transformers(model: Model) -> Any:  # its own types do not fit its own methods
    """Returns the same decoder as `transformers` has it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config, own = model.config, model.upper.state_dict()
    other = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocabulary, hidden_size=config.hidden, intermediate_size=config.intermediate,
            num_hidden_layers=config.upper_layers, num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.positions, rms_norm_eps=config.norm_eps, bos_token_id=START, eos_token_id=None,
            pad_token_id=0, rope_parameters={"rope_type": "default", "rope_theta": config.rotary_base},
        )
    ).eval()  # fmt: skip
    weights = {"model.norm.weight": own["final_norm.weight"], "lm_head.weight": own["next_token.weight"]}
    for i in range(config.upper_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        parts = own[f"{ours}.qkv.weight"].split([config.query_width, config.key_width, config.key_width])
        for name, part in zip("qkv", parts, strict=True):
            weights[f"{theirs}.self_attn.{name}_proj.weight"] = part
        gate, up = own[f"{ours}.ffn_in.weight"].chunk(2)
        weights |= {
            f"{theirs}.self_attn.o_proj.weight": own[f"{ours}.attention_out.weight"],
            f"{theirs}.mlp.gate_proj.weight": gate,
            f"{theirs}.mlp.up_proj.weight": up,
            f"{theirs}.mlp.down_proj.weight": own[f"{ours}.ffn_out.weight"],
            f"{theirs}.input_layernorm.weight": own[f"{ours}.attention_norm.weight"],
            f"{theirs}.post_attention_layernorm.weight": own[f"{ours}.ffn_norm.weight"],
        }
    missing, unexpected = other.load_state_dict(weights, strict=False)
    assert set(missing) == {"model.embed_tokens.weight"} and not unexpected
    return other


def _halves(case: GenerateBench, whole: Model, half: Model) -> dict:
    """An hGPT and the whole model on the same engine."""
    benches = {"full": Bench(whole), "hgpt": Bench(half)}
    variants: dict[str, Callable[[], float]] = {}
    for name, bench in benches.items():

        def decode(bench: Bench = bench) -> float:
            """Returns the tokens a second behind the prompts."""
            for prompt in prompts_of(case, 16, 8):
                bench.ask(prompt, 48)
            for _ in range(2):
                bench.loop.step()
            return 16 * 46 / bench.run()

        def first(bench: Bench = bench) -> float:
            bench.ask(prompts_of(case, 1, 255)[0], 1)
            return bench.run()

        variants |= {f"{name} decode": decode, f"{name} first": first}
    found = in_turn(variants, case.rounds)
    weights = {name: _weights(model) for name, model in (("full", whole), ("hgpt", half))}
    layers = {name: _weights(model, False) for name, model in (("full", whole), ("hgpt", half))}
    return {
        "decode_ratio": round(found["hgpt decode"] / found["full decode"], 3),
        "decode_bound": round(weights["full"] / weights["hgpt"], 3),
        "first_token_ratio": round(found["full first"] / found["hgpt first"], 3),
        "first_token_bound": round(layers["full"] / layers["hgpt"], 3),
    }


def _weights(model: Model, with_logits: bool = True) -> int:
    """Returns the weights that a token passes."""
    named = model.upper.named_parameters()
    return sum(weight.numel() for name, weight in named if with_logits or not name.startswith("next_token"))


def _tenants(case: GenerateBench, whole: Model, half: Model) -> dict:
    """32 sequences at a time: of 10,000 tenants or of 32, and of 32 in a step or of one."""
    sources = half.tenants(case.tenants, rank=4)
    chance = np.random.default_rng(0)
    pools = (case.tenants, SHARING, 1)
    drawn = {pool: cycle(chance.permutation(pool).tolist()) for pool in pools}  # in turn, so that those of a step differ
    prompts, lengths = prompts_of(case, 96, 16), lengths_of(96)
    bench = Bench(half, SHARING)

    def serve(pool: int) -> float:
        for prompt, length in zip(prompts, lengths, strict=True):
            bench.ask(prompt, length, sources[next(drawn[pool])])
        return sum(lengths) / bench.run()

    found = in_turn({f"{pool} tenants": partial(serve, pool) for pool in pools}, case.rounds)
    many, some, one = found.values()
    assert sources[0].adapter is not None
    layout = sources[0].adapter[1].layout
    shared = 4 * _weights(half)
    own = layout.layers * layout.layer_size * 4
    return {
        f"tenants_{case.tenants}_over_{SHARING}": round(many / some, 3),
        f"distinct_{SHARING}_over_1": round(some / one, 3),
        "distinct_bound": round((shared + own) / (shared + SHARING * own), 3),
    }


def _overload(case: GenerateBench, whole: Model, half: Model) -> dict:
    """Twice as many requests as can be answered, each with a promise for its first token and for the whole."""
    bench = Bench(half, case.prompts)
    prompts, lengths = prompts_of(case, 500, 32), lengths_of(500)
    for prompt, length in zip(prompts[:64], lengths, strict=False):
        bench.ask(prompt, length)
    rate = 64 / bench.run()
    step_ns = bench.loop.cost.predict(case.prompts, case.prompts)
    first, whole_ns = int(20 * step_ns), int(20 * step_ns + 1.5 * MOST * step_ns)
    promise = Promise(whole_ns, first)
    bench = Bench(half, case.prompts, admission=True)
    for prompt, length in zip(prompts[:32], lengths, strict=False):  # the model of costs and lengths learns
        bench.ask(prompt, length)
    bench.run()
    taken: list[Answered] = []
    refusals: list[float] = []
    begin, sent = time.perf_counter(), 0
    while (now := time.perf_counter() - begin) < case.seconds:
        while sent < 2 * rate * now:
            due = begin + sent / (2 * rate)  # during a step, and offered after it: the wait counts
            try:
                taken.append(bench.ask(prompts[sent % 500], lengths[sent % 500], promise=promise, due=due))
            except DeadlineMissed:
                refusals.append(time.perf_counter() - due)
            sent += 1
        bench.loop.step()
    bench.run()
    good = [
        one
        for one in taken
        if one.error is None
        and one.first - one.asked <= first / 1e9
        and one.last - one.asked <= whole_ns / 1e9
        and one.tokens == one.request.sampling.max_tokens
    ]
    return {
        "overload_sent": sent,
        "overload_refused": len(refusals),
        "overload_on_time": round(len(good) / max(1, len(taken)), 3),
        "refusal_p99_ms": round(float(np.percentile(refusals, 99)) * 1000, 2) if refusals else 0.0,
    }
