"""Chooses the next token of each row of logits. Every row has settings of its own, and no row changes another's choice."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

from hplm.generation.request import DecoderRequest, Sequence, Token
from hplm.generation.sampling import GREEDY, Sampling, uniform
from hplm.model.tensors import array_of, sent, tensor_of

SCORED = 64  # tokens of prompts whose logits are in memory at a time
CANDIDATES = 256  # the likeliest tokens, which nearly always hold all that `top_p` allows


@torch.inference_mode()
def sample(logits: Tensor, sequences: Many[Sequence], end_ids: Many[int]) -> list[Token]:
    """Returns the next token of each sequence. `logits`: sequences x vocabulary, fp32. They are changed."""
    settings = [sequence.request.sampling for sequence in sequences]
    told = [row for row, sampling in enumerate(settings) if sampling.logprobs is not None]
    plain = logits[told].log_softmax(dim=1) if told else None
    for own, sequence in zip(logits, sequences, strict=True):
        _correct(own, sequence, end_ids)
    best, likeliest = logits.max(dim=1)
    chosen = likeliest.masked_fill(~best.isfinite(), -1)
    drawn = [row for row, sampling in enumerate(settings) if sampling.temperature >= GREEDY]
    if drawn:
        rows = sent(torch.tensor(drawn), logits.device)
        picked = _draw(logits if len(drawn) == len(settings) else logits[rows], best[rows], [sequences[row] for row in drawn])
        chosen[rows] = torch.where(chosen[rows] < 0, -1, picked)
    ids: list[int] = array_of(chosen.cpu()).tolist()
    tokens = [Token(id) for id in ids]
    if plain is not None:
        for row, logprobs in zip(told, plain, strict=True):
            tokens[row] = _token_with_logprobs(ids[row], logprobs, settings[row].logprobs or 0)
    return tokens


def score(request: DecoderRequest, place: int, read: Tensor, logits_of: Callable[[Tensor], Tensor]) -> None:
    """Adds to a request the tokens of its prompt that come behind `read`, states from this place of the prompt on.

    Those that were scored before are left out: a step may be computed again.
    """
    first = len(request.scored)
    following = request.prompt[first + 1 : place + len(read) + 1]
    for at in range(0, len(following), SCORED):
        ids = following[at : at + SCORED]
        start = first - place + at
        logprobs = logits_of(read[start : start + len(ids)]).log_softmax(dim=1)
        own = zip(ids, logprobs, strict=True)
        request.scored += [_token_with_logprobs(id, row, request.sampling.logprobs or 0) for id, row in own]


def _token_with_logprobs(id: int, logprobs: Tensor, count: int) -> Token:
    if id < 0:
        return Token(id)
    best = logprobs.topk(min(count, len(logprobs)))
    ids: list[int] = array_of(best.indices.cpu()).tolist()
    values: list[float] = array_of(best.values.cpu()).tolist()
    return Token(id, float(logprobs[id]), tuple(zip(ids, values, strict=True)))


def _correct(logits: Tensor, sequence: Sequence, end_ids: Many[int]) -> None:
    """Applies penalties, biases and barred tokens to the logits of a sequence."""
    sampling = sequence.request.sampling
    if sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1:
        _penalise(logits, sequence)
    if sampling.logit_bias:
        ids, amounts = list(sampling.logit_bias), list(sampling.logit_bias.values())
        logits[sent(torch.tensor(ids), logits.device)] += sent(torch.tensor(amounts, dtype=logits.dtype), logits.device)
    if sequence.generated < sampling.min_tokens and (barred := [*end_ids, *sampling.stop_token_ids]):
        logits[sent(torch.tensor(barred), logits.device)] = -torch.inf
    if sequence.grammar is not None:
        logits.masked_fill_(sent(sequence.grammar.barred(), logits.device), -torch.inf)


def _penalise(logits: Tensor, sequence: Sequence) -> None:
    """Repetition counts the prompt too; presence and frequency count the answer only."""
    sampling, ids = sequence.request.sampling, np.array(sequence.ids, dtype=np.int64)
    if sampling.repetition_penalty != 1:
        seen = sent(np.unique(ids), logits.device)
        before = logits[seen]
        logits[seen] = torch.where(before > 0, before / sampling.repetition_penalty, before * sampling.repetition_penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        answered, counts = np.unique(ids[len(ids) - sequence.generated :], return_counts=True)
        less = sampling.presence_penalty + sampling.frequency_penalty * counts
        logits[sent(answered, logits.device)] -= sent(tensor_of(less).to(logits.dtype), logits.device)


def _draw(logits: Tensor, best: Tensor, sequences: Many[Sequence]) -> Tensor:
    """Returns a token of each row, by the inverse of its distribution function: the tokens lie in order of their ids.

    What top_k, top_p and min_p leave out is decided by bounds on the logits. So tokens that are equally likely stay or go
    together, and the choice does not depend on how a device sorts.
    """
    settings = [sequence.request.sampling for sequence in sequences]

    def column(values: Many[float]) -> Tensor:
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
    # In 32 bits on CUDA a running sum may fall from one token to the next, so that an excluded one could be drawn.
    until = weights.cumsum(dim=1, dtype=torch.float64 if logits.device.type == "cuda" else None)
    total = until[:, -1:].contiguous()
    seeds, places = zip(*((sequence.seed, sequence.generated) for sequence in sequences), strict=True)
    numbers = uniform(np.array(seeds, dtype=np.uint64), np.array(places, dtype=np.uint64))
    picked = torch.searchsorted(until, total * sent(numbers, logits.device)[:, None], right=True)
    return torch.minimum(picked, torch.searchsorted(until, total))[:, 0]  # rounding must not lead beyond the last token


def _bounds(scaled: Tensor, bounds: Tensor, settings: Many[Sampling]) -> Tensor:
    """Returns the least logit of each row that min_p (`bounds`), then top_k, then top_p leave in."""
    vocabulary = scaled.shape[1]
    count = min(max([CANDIDATES, *(sampling.top_k for sampling in settings)]), vocabulary)
    first = scaled.topk(count, dim=1).values
    while (found := _bounds_among(first, scaled, bounds, settings)) is None:
        first = scaled.sort(dim=1, descending=True).values
    return found


def _bounds_among(first: Tensor, scaled: Tensor, bounds: Tensor, settings: Many[Sampling]) -> Tensor | None:
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
