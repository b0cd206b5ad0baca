"""How busy a decoder is, and how many tokens its next step may have."""

from __future__ import annotations

from hplm.generation.forecast import BELIEVED, Ahead, Load
from hplm.generation.running import Running
from hplm.scheduling.cost import CostModel

LEAST_CHUNK = 16  # tokens of prompts in a step, even if a promise for single tokens is broken by it: prompts must get on
SLOWER = 3  # so many times as long may a step take because of prompts, if sequences grow beside them


def load_of(running: Running, cost: CostModel, share: float) -> Load:
    """Returns the load of what runs. By it the queue refuses at once what cannot be in time.

    `share`: the part of `max_tokens` that an answer usually has.
    """
    step, token, sequence_ns, _ = cost.terms.tolist()
    ends = sorted((sequence.expected(share), running.places(sequence, share)) for sequence in running.sequences)
    lengths = [sequence.request.sampling.max_tokens for sequence in running.sequences]
    return Load(
        believed=cost.observed >= BELIEVED,
        step_ns=step,
        token_ns=token,
        sequence_ns=sequence_ns,
        seats=running.seats,
        step_tokens=running.step_tokens,
        places=running.cache.tokens,
        free=running.spare(share),
        uncomputed=running.uncomputed,
        tenants={one.tenant: one.uncomputed > 1 for one in sorted(running.sequences, key=lambda one: one.uncomputed)},
        ends=ends,
        mean_tokens=share * sum(lengths) / len(lengths) if lengths else 1.0,
        further=Ahead(len(running.further), 0, sum(running.places(sequence, share) for sequence in running.further)),
    )


def most_tokens(running: Running, cost: CostModel, share: float) -> int:
    """Returns how many tokens a step may have, so that pieces of prompts do not hold up sequences that grow.

    They may take the fair share of their tenants, or SLOWER times what the step takes without them. A promise for the time
    between tokens lowers the second one.
    """
    sequences = running.sequences
    growing = [one for one in sequences if one.uncomputed == 1]
    if not growing or len(growing) == len(sequences) or cost.observed < BELIEVED:
        return running.step_tokens
    load, promised = load_of(running, cost, share), [one for one in growing if one.request.promise.token_ns]
    reading = {one.tenant for one in sequences if one.uncomputed > 1} - {one.tenant for one in promised or growing}
    fair_ns = load.fair_ns(len(growing), len({one.tenant for one in sequences}), len(reading))
    without = load.decoding_ns(len(growing))
    bound = max(fair_ns, min([SLOWER * without, *(one.request.promise.token_ns for one in promised)]))
    allowed = len(growing) + int((bound - without) / max(load.token_ns, 1e-9))
    return min(running.step_tokens, max(allowed, len(growing) + LEAST_CHUNK))
