"""The choice of tokens: its distribution, its settings, and that no row and no company changes another row's choice."""

from collections import Counter

import numpy as np
import pytest
import torch

from hplm.errors import InvalidInput
from hplm.generation.choosing import CANDIDATES, Wish, choose, seed_of, uniform
from hplm.generation.sampling import GREEDY, Sampling, read_sampling

VOCABULARY = 1000


def logits_of(seed, vocabulary=VOCABULARY, spread=3.0):
    return torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def chosen(logits, *wishes):
    return [token.id for token in choose(logits.clone(), wishes)]


def drawn(logits, sampling, count=4000):
    """Returns how often each token was chosen, at different places of one answer."""
    wishes = [Wish(sampling, seed=7, place=place) for place in range(count)]
    return Counter(chosen(logits.expand(count, -1), *wishes))


def expected(logits, temperature=1.0, allowed=None):
    probabilities = (logits[0].double() / temperature).softmax(0)
    if allowed is not None:
        probabilities[[i for i in range(len(probabilities)) if i not in allowed]] = 0
    return (probabilities / probabilities.sum()).tolist()


def far_from(found, probabilities):
    """Returns the largest difference in standard deviations."""
    count = sum(found.values())
    return max(
        abs(found[i] - count * p) / max(1.0, (count * p * (1 - p)) ** 0.5) for i, p in enumerate(probabilities) if p or found[i]
    )


def test_numbers_are_uniform_and_depend_on_seed_and_place_only():
    seeds = np.repeat(np.arange(50, dtype=np.uint64), 200)
    places = np.tile(np.arange(200, dtype=np.uint64), 50)
    numbers = uniform(seeds, places)
    assert numbers.dtype == np.float32 and numbers.min() >= 0 and numbers.max() < 1
    counts = np.histogram(numbers, 20, (0, 1))[0]
    assert np.abs(counts - 500).max() < 6 * 500**0.5
    assert len(np.unique(numbers)) > 9900
    assert (uniform(seeds[77:78], places[77:78]) == numbers[77]).all()


def test_each_answer_of_a_request_has_a_seed_of_its_own():
    assert seed_of(5, 0) == 5
    assert len({seed_of(seed, choice) for seed in (-1, 0, 5) for choice in range(16)}) == 48


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_tokens_are_drawn_by_their_probability(temperature):
    logits = logits_of(1, 12, 1.0)
    assert far_from(drawn(logits, Sampling(temperature=temperature)), expected(logits, temperature)) < 4.5


def test_top_k_top_p_and_min_p_leave_out_the_others():
    logits = logits_of(2, 12, 1.0)
    ordered = logits[0].argsort(descending=True).tolist()
    probabilities = logits[0].softmax(0)
    assert far_from(drawn(logits, Sampling(top_k=4)), expected(logits, allowed=ordered[:4])) < 4.5
    until = probabilities[ordered].cumsum(0)
    nucleus = ordered[: int((until < 0.8).sum()) + 1]
    assert far_from(drawn(logits, Sampling(top_p=0.8)), expected(logits, allowed=nucleus)) < 4.5
    likely = [i for i in range(12) if probabilities[i] >= 0.2 * probabilities.max()]
    assert far_from(drawn(logits, Sampling(min_p=0.2)), expected(logits, allowed=likely)) < 4.5
    both = probabilities[ordered[:5]] / probabilities[ordered[:5]].sum()
    first = ordered[: int((both.cumsum(0) < 0.6).sum()) + 1]
    assert set(drawn(logits, Sampling(top_k=5, top_p=0.6))) == set(first)


def test_a_nucleus_beyond_the_candidates_is_exact():
    logits = logits_of(3, 4 * CANDIDATES, 0.1)  # nearly equal: the nucleus holds most tokens
    ordered = logits[0].argsort(descending=True).tolist()
    until = logits[0].double().softmax(0)[ordered].cumsum(0)
    nucleus = set(ordered[: int((until < 0.9).sum()) + 1])
    assert len(nucleus) > CANDIDATES
    found = drawn(logits, Sampling(top_p=0.9), 20_000)
    assert len(found.keys() - nucleus) <= 1 and len(found) > 0.99 * len(nucleus)


@pytest.mark.parametrize(
    "given",
    [{"temperature": 0}, {"top_p": 1e-6}, {"top_k": 1}, {"min_p": 1.0}, {"temperature": 1e-4}, {"temperature": 1e-30}],
)
def test_some_settings_leave_the_likeliest_token_alone(given):
    logits = torch.cat([logits_of(i) for i in range(5)])
    wishes = [Wish(Sampling(**given), seed, place) for seed in range(5) for place in range(10)]
    assert chosen(logits.repeat_interleave(10, 0), *wishes) == logits.argmax(1).repeat_interleave(10).tolist()


def extremes_of(name):
    """Returns the least and the largest number that is read for a setting, and those next to 0, as far as they may be given."""
    extremes = []
    for value in (-100, -2, 0, 1e-300, 1e-39, GREEDY, 0.01, 1, 2, 100):
        try:
            extremes.append(read_sampling({name: value}))
        except InvalidInput:
            continue
    return extremes


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
def test_no_number_that_is_read_makes_logits_overflow(name):
    logits = torch.tensor([[-1e6, -30.0, 0.0, 30.0, 1e6]])
    for sampling in extremes_of(name):
        wish = Wish(sampling, 0, 4, np.array([0, 1, 3, 4]), 2)
        assert choose(logits.clone(), [wish])[0].id >= 0


SETTINGS = [
    Sampling(**given)
    for given in (
        {}, {"temperature": 0}, {"top_k": 3}, {"top_p": 0.5, "temperature": 1.5}, {"min_p": 0.1}, {"logprobs": 3},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3}, {"logit_bias": {5: 100.0}},
    )
]  # fmt: skip


def test_company_changes_no_choice():
    generator = np.random.default_rng(0)
    rows = [
        (logits_of(i), Wish(SETTINGS[i % len(SETTINGS)], i, i * 3, generator.integers(0, VOCABULARY, 30), 10))
        for i in range(40)
    ]
    alone = [choose(logits.clone(), [wish])[0] for logits, wish in rows]
    for size in (2, 7, 40):
        order = generator.permutation(40)[:size]
        together = choose(torch.cat([rows[i][0] for i in order]), [rows[i][1] for i in order])
        for i, token in zip(order, together, strict=True):
            assert token.id == alone[i].id
            assert [id for id, _ in token.likeliest] == [id for id, _ in alone[i].likeliest]


def test_penalties_count_the_answer_and_repetition_the_prompt_too():
    logits = torch.zeros(1, 6)
    logits[0, 4] = -1.0
    ids = np.array([0, 1, 2, 2, 4])  # the prompt is 0, 1

    def corrected(**settings):
        changed = logits.clone()
        choose(changed, [Wish(Sampling(temperature=0, **settings), 0, 0, ids, 2)])
        return changed[0].tolist()

    assert corrected(presence_penalty=0.5) == [0, 0, -0.5, 0, -1.5, 0]
    assert corrected(frequency_penalty=0.5) == [0, 0, -1.0, 0, -1.5, 0]
    assert corrected(repetition_penalty=2.0) == [0, 0, 0, 0, -2.0, 0]
    logits += 2
    assert corrected(repetition_penalty=2.0) == [1, 1, 1, 2, 0.5, 2]


def test_a_bias_and_a_barred_token():
    logits = logits_of(5)
    best = int(logits.argmax())
    second = int(logits[0].argsort(descending=True)[1])
    assert chosen(logits, Wish(Sampling(temperature=0, logit_bias={3: 100.0}), 0, 0)) == [3]
    assert chosen(logits, Wish(Sampling(temperature=0), 0, 0, barred=(best,))) == [second]


def test_logprobs_are_those_of_the_model_alone():
    logits = logits_of(6)
    plain = logits[0].log_softmax(0)
    (token,) = choose(logits.clone(), [Wish(Sampling(temperature=0, logit_bias={3: 100.0}, logprobs=2), 0, 0)])
    assert token.id == 3 and token.logprob == pytest.approx(float(plain[3]))
    values, ids = plain.topk(2)
    assert [id for id, _ in token.likeliest] == ids.tolist()
    assert [value for _, value in token.likeliest] == pytest.approx(values.tolist())
    assert choose(logits.clone(), [Wish(Sampling(temperature=0), 0, 0)])[0].logprob is None


def test_logits_that_are_no_numbers_give_no_token_and_harm_no_other_row():
    logits = torch.cat([logits_of(i) for i in range(4)])
    clean = chosen(logits, *[Wish(SETTINGS[i], i, i) for i in range(4)])
    logits[1, 17] = torch.nan
    logits[2, 3] = torch.inf
    assert chosen(logits, *[Wish(SETTINGS[i], i, i) for i in range(4)]) == [clean[0], -1, -1, clean[3]]
