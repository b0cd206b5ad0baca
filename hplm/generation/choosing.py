"""Chooses the next token of each row of logits. Every row has settings of its own, and no row changes another's choice.

A draw takes one uniform number, from a seed and the token's place. So company and timing never change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hplm.arrays import Array
from hplm.generation.sampling import Sampling
from hplm.model.tensors import array_of, sent, tensor_of

CANDIDATES = 256  # the likeliest tokens, which nearly always hold all that `top_p` allows
NO_IDS = np.empty(0, dtype=np.int64)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
BITS = 24  # as many as a float of 32 bits holds exactly


@dataclass(frozen=True)
class Wish:
    """The settings and earlier tokens that decide a row's next token, besides its logits."""

    sampling: Sampling
    seed: int
    place: int  # of the token in the answer
    ids: Array = field(default_factory=lambda: NO_IDS)  # of prompt and answer, for penalties; int64
    prompt: int = 0  # how many of them are the prompt's
    barred: Sequence[int] = ()  # tokens that may not come now


@dataclass(frozen=True, slots=True)
class Token:
    """A chosen token. `id` is -1 if the logits are no numbers."""

    id: int
    logprob: float | None = None  # of the model alone, before any setting
    likeliest: tuple[tuple[int, float], ...] = ()  # tokens and their logprobs, where they were asked for


@torch.inference_mode()
def choose(logits: Tensor, wishes: Sequence[Wish]) -> list[Token]:
    """`logits`: rows x vocabulary, fp32, one row for each wish. They are changed."""
    told = [row for row, wish in enumerate(wishes) if wish.sampling.logprobs is not None]
    plain = logits[told].log_softmax(dim=1) if told else None
    _correct(logits, wishes)
    best, likeliest = logits.max(dim=1)
    chosen = likeliest.masked_fill(~best.isfinite(), -1)
    drawn = [row for row, wish in enumerate(wishes) if not wish.sampling.is_greedy]
    if drawn:
        rows = sent(torch.tensor(drawn), logits.device)
        picked = _draw(logits if len(drawn) == len(wishes) else logits[rows], best[rows], [wishes[row] for row in drawn])
        chosen[rows] = torch.where(chosen[rows] < 0, -1, picked)
    ids: list[int] = array_of(chosen.cpu()).tolist()
    tokens = [Token(id) for id in ids]
    if plain is not None:
        for row, logprobs in zip(told, plain, strict=True):
            tokens[row] = _told(ids[row], logprobs, wishes[row].sampling.logprobs or 0)
    return tokens


def _told(id: int, logprobs: Tensor, count: int) -> Token:
    if id < 0:
        return Token(id)
    best = logprobs.topk(min(count, len(logprobs)))
    ids: list[int] = array_of(best.indices.cpu()).tolist()
    values: list[float] = array_of(best.values.cpu()).tolist()
    return Token(id, float(logprobs[id]), tuple(zip(ids, values, strict=True)))


def _correct(logits: Tensor, wishes: Sequence[Wish]) -> None:
    """Applies penalties, biases and barred tokens."""
    for row, wish in enumerate(wishes):
        sampling, own = wish.sampling, logits[row]
        if sampling.has_penalties:
            _penalise(own, wish)
        if sampling.logit_bias:
            ids, amounts = list(sampling.logit_bias), list(sampling.logit_bias.values())
            own[sent(torch.tensor(ids), own.device)] += sent(torch.tensor(amounts, dtype=own.dtype), own.device)
        if wish.barred:
            own[sent(torch.tensor(wish.barred), own.device)] = -torch.inf


def _penalise(own: Tensor, wish: Wish) -> None:
    """Repetition counts the prompt too; presence and frequency count the answer only."""
    sampling = wish.sampling
    if sampling.repetition_penalty != 1:
        seen = sent(np.unique(wish.ids), own.device)
        before = own[seen]
        own[seen] = torch.where(before > 0, before / sampling.repetition_penalty, before * sampling.repetition_penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        said, counts = np.unique(wish.ids[wish.prompt :], return_counts=True)
        less = sampling.presence_penalty + sampling.frequency_penalty * counts
        own[sent(said, own.device)] -= sent(tensor_of(less).to(own.dtype), own.device)


def _draw(logits: Tensor, best: Tensor, wishes: Sequence[Wish]) -> Tensor:
    """Returns a token of each row, by the inverse of its distribution function: the tokens lie in order of their ids.

    What top_k, top_p and min_p leave out is decided by bounds on the logits. So tokens that are equally likely stay or go
    together, and the choice does not depend on how a device sorts.
    """
    settings = [wish.sampling for wish in wishes]

    def column(values: Sequence[float]) -> Tensor:
        return sent(torch.tensor(values, dtype=logits.dtype), logits.device)[:, None]

    # The best logit becomes 0: a low temperature must not overflow.
    scaled = (logits - best[:, None]) / column([sampling.temperature for sampling in settings])
    bounds = torch.full_like(best, -torch.inf)[:, None]
    if any(sampling.min_p for sampling in settings):
        bounds = torch.maximum(bounds, column([sampling.min_p for sampling in settings]).log())
    limited = [row for row, sampling in enumerate(settings) if sampling.top_k or sampling.top_p < 1]
    if limited:
        rows = sent(torch.tensor(limited), logits.device)
        bounds[rows] = _bounds(scaled[rows], bounds[rows], [settings[row] for row in limited])
    weights = torch.where(scaled >= bounds, scaled, -torch.inf).exp_()
    until = weights.cumsum(dim=1)
    total = until[:, -1:].contiguous()
    numbers = uniform(
        np.array([wish.seed for wish in wishes], dtype=np.uint64), np.array([wish.place for wish in wishes], dtype=np.uint64)
    )
    picked = torch.searchsorted(until, total * sent(numbers, logits.device)[:, None], right=True)
    return torch.minimum(picked, torch.searchsorted(until, total))[:, 0]  # rounding must not lead beyond the last token


def _bounds(scaled: Tensor, bounds: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Returns the least logit of each row that min_p (`bounds`), then top_k, then top_p leave in."""
    vocabulary = scaled.shape[1]
    count = min(max([CANDIDATES, *(sampling.top_k for sampling in settings)]), vocabulary)
    first = scaled.topk(count, dim=1).values
    while (found := _bounds_among(first, scaled, bounds, settings)) is None:
        first = scaled.sort(dim=1, descending=True).values
    return found


def _bounds_among(first: Tensor, scaled: Tensor, bounds: Tensor, settings: Sequence[Sampling]) -> Tensor | None:
    """Returns the bounds, or None if `first`, the likeliest of each row in order, are too few to tell."""
    count, vocabulary = first.shape[1], scaled.shape[1]
    kth = [min(sampling.top_k or vocabulary, vocabulary) for sampling in settings]
    at = sent(torch.tensor([min(k, count) for k in kth]), scaled.device)[:, None] - 1
    cut = sent(torch.tensor([k < vocabulary for k in kth]), scaled.device)[:, None]
    bounds = torch.where(cut, torch.maximum(bounds, first.gather(1, at)), bounds)
    shares = [sampling.top_p for sampling in settings]
    if all(share >= 1 for share in shares):
        return bounds
    weights = torch.where(first >= bounds, first, -torch.inf).exp()
    whole = torch.where(scaled >= bounds, scaled, -torch.inf).exp().sum(dim=1, keepdim=True)
    wanted = whole * sent(torch.tensor(shares, dtype=scaled.dtype), scaled.device)[:, None]
    until = weights.cumsum(dim=1)
    below_one = sent(torch.tensor([share < 1 for share in shares]), scaled.device)[:, None]
    if count < vocabulary and bool((below_one & (until[:, -1:] < wanted)).any()):
        return None
    last = torch.searchsorted(until, wanted).clamp(max=count - 1)
    return torch.where(below_one, torch.maximum(bounds, first.gather(1, last)), bounds)


def mixed(numbers: Array) -> Array:
    """Returns 64 random bits for each number of 64 bits: the function `splitmix64` of Steele, Lea and Flood (2014)."""
    with np.errstate(over="ignore"):
        bits = numbers + GOLDEN
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return bits ^ (bits >> np.uint64(31))


def seed_of(seed: int, choice: int) -> int:
    """Returns the seed of one answer of a request. The first answer has the request's own."""
    if not choice:
        return seed % 2**64
    own = np.array([seed % 2**64], dtype=np.uint64)
    return int(mixed(own ^ mixed(np.array([choice], dtype=np.uint64)))[0])


def uniform(seeds: Array, places: Array) -> Array:
    """Returns a number from 0 to below 1 for each pair of a seed and a place, float32."""
    bits = mixed(seeds.astype(np.uint64) ^ mixed(places.astype(np.uint64)))
    return (bits >> np.uint64(64 - BITS)).astype(np.float32) * np.float32(2.0**-BITS)
