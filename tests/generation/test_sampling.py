"""Sampling: how it is read from requests and settings, the distribution of tokens, and that no row changes another's choice."""

import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hplm.errors import InvalidInput
from hplm.generation.sampler import CANDIDATES, sample
from hplm.generation.sampling import GREEDY, SETTINGS, Sampling, StructuredOutputs, sampling_of, seed_of, uniform
from hplm.generation.settings import read_settings
from tests.generation.world import growing
from tests.support.message import mentioning

VOCABULARY = 1000


def logits_of(seed, vocabulary=VOCABULARY, spread=3.0):
    return torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def chosen(logits, *sequences, end_ids=()):
    return [token.id for token in sample(logits.clone(), sequences, end_ids)]


def distribution(logits, sampling, ids=(), answered=0, barred=()):
    """Returns the probability of each token, computed as the documents say, in float64. `ids` end with the answer's."""
    own = logits[0].double().tolist()
    said = Counter(ids[len(ids) - answered :])
    for id in {*ids}:  # those of the prompt too
        factor = sampling.repetition_penalty
        own[id] = own[id] / factor if own[id] > 0 else own[id] * factor
        own[id] -= sampling.presence_penalty * (id in said) + sampling.frequency_penalty * said[id]
    own = [-math.inf if id in barred else logit + sampling.logit_bias.get(id, 0) for id, logit in enumerate(own)]
    best = max(own)
    if sampling.temperature == 0:
        return [float(logit == best) for logit in own]
    weights = [math.exp((logit - best) / sampling.temperature) for logit in own]
    left = sorted(range(len(own)), key=lambda id: -weights[id])
    left = [id for id in left if weights[id] >= sampling.min_p][: sampling.top_k or None]
    whole, until, nucleus = sum(weights[id] for id in left), 0.0, set()
    for id in left:
        if until < sampling.top_p * whole:
            nucleus.add(id)
        until += weights[id]
    whole = sum(weights[id] for id in nucleus)
    return [weight / whole if id in nucleus else 0.0 for id, weight in enumerate(weights)]


def test_each_place_of_an_answer_has_a_draw_of_its_own():
    found = chosen(torch.zeros(1, VOCABULARY).expand(50, -1), *[growing(Sampling(), 7, place) for place in range(50)])
    assert len(set(found)) > 1


def drawn(logits, sampling, count, ids=(), answered=0, barred=()):
    """Returns how often each token was chosen, with different seeds."""
    sampling = replace(sampling, min_tokens=answered + 1)
    return Counter(
        chosen(logits.expand(count, -1), *[growing(sampling, seed, answered, ids) for seed in range(count)], end_ids=barred)
    )


def far_from(found, probabilities):
    """Returns the largest difference in standard deviations; infinity if a token came that may not come."""
    count = sum(found.values())
    if any(not probabilities[id] for id in found):
        return math.inf
    return max(abs(found[i] - count * p) / max(1.0, (count * p * (1 - p)) ** 0.5) for i, p in enumerate(probabilities) if p)


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


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0, 1e-30, 1e-4, 0.3, 1, 2]),
    top_k=st.sampled_from([0, 0, 1, 4, 99]),
    top_p=st.sampled_from([1, 1e-6, 0.5, 0.8]),
    min_p=st.sampled_from([0, 0, 0.2, 1.0]),
    presence_penalty=st.sampled_from([0, 0.5, -2]),
    frequency_penalty=st.sampled_from([0, 0.5, 2]),
    repetition_penalty=st.sampled_from([1, 2, 0.5]),
    logit_bias=st.sampled_from([{}, {3: 100.0}, {3: -100.0, 5: 1.5}]),
)


@settings(max_examples=50, derandomize=True)
@given(
    st.integers(0, 10**6),
    SAMPLINGS,
    st.lists(st.integers(0, 11), max_size=6),
    st.integers(0, 6),
    st.sets(st.integers(0, 11), max_size=2),
)
def test_tokens_are_drawn_by_the_distribution_that_settings_leave(seed, sampling, ids, prompt, barred):
    """Penalties count the answer, and the one of repetition counts the prompt too."""
    logits, more = logits_of(seed, 12, 1.0), (ids, max(0, len(ids) - prompt), sorted(barred))
    assert far_from(drawn(logits, sampling, 400, *more), distribution(logits, sampling, *more)) < 5


def test_a_nucleus_beyond_the_candidates_is_exact():
    logits, sampling = logits_of(3, 4 * CANDIDATES, 0.1), Sampling(top_p=0.9)  # nearly equal: the nucleus holds most tokens
    expected = distribution(logits, sampling)
    nucleus = {id for id, probability in enumerate(expected) if probability}
    assert len(nucleus) > CANDIDATES
    found = drawn(logits, sampling, 8_000)
    assert len(found.keys() - nucleus) <= 1 and len(found) > 0.99 * len(nucleus)


EXTREMES = {
    "temperature": [0, 1e-300, 1e-39, GREEDY, 100],
    "top_p": [1e-300, 1e-39, 1],
    "min_p": [1e-300, 1e-39, 1],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 2],
    "repetition_penalty": [0.01, 100],
}


@pytest.mark.parametrize("name", EXTREMES)
def test_no_number_that_is_read_makes_logits_overflow(name):
    logits = torch.tensor([[-1e6, -30.0, 0.0, 30.0, 1e6]])
    for value in EXTREMES[name]:
        assert chosen(logits, growing(sampling_of({name: value}, None), 0, 2, [0, 1, 3, 4]))[0] >= 0


FOUR = [Sampling(), Sampling(temperature=0), Sampling(top_k=3), Sampling(temperature=1.5, top_p=0.5)]


def test_logprobs_are_those_of_the_model_alone():
    logits = logits_of(6)
    plain = logits[0].log_softmax(0)
    plainly = Sampling(temperature=0, logit_bias={3: 100.0})
    token, untold = sample(logits.repeat(2, 1), [growing(replace(plainly, logprobs=2), 0, 0), growing(plainly, 0, 0)], ())
    assert token.id == 3 and token.logprob == pytest.approx(float(plain[3]))
    values, ids = plain.topk(2)
    assert [id for id, _ in token.likeliest] == ids.tolist()
    assert [value for _, value in token.likeliest] == pytest.approx(values.tolist())
    assert untold.id == 3 and untold.logprob is None


def test_logits_that_are_no_numbers_give_no_token_and_harm_no_other_row():
    logits, sequences = torch.cat([logits_of(i) for i in range(4)]), [growing(FOUR[i], i, i) for i in range(4)]
    clean = chosen(logits, *sequences)
    logits[1, 17] = torch.nan
    logits[2, 3] = torch.inf
    assert chosen(logits, *sequences) == [clean[0], -1, -1, clean[3]]


GIVEN = {
    "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "presence_penalty": -1, "frequency_penalty": 2,
    "repetition_penalty": 1.1, "logit_bias": {"12": -100, "7": 3.5}, "seed": -5, "stop": ["\n", "END"],
    "stop_token_ids": [3, 4], "ignore_eos": True, "max_tokens": 100, "min_tokens": 2, "n": 3, "logprobs": 5, "echo": True,
    "structured_outputs": {"regex": "a+"},
}  # fmt: skip
PARAMETERS = {
    "max_sequences": "4", "step_tokens": "64", "cache_tokens": "512", "policy": "timely",
    "queue_texts": "10", "queue_mb": "2", "deadline_ms": "1.5", "plot_hot": "7", "threads": "3", "dtype": "fp32",
    "kept_mb": "5",
}  # fmt: skip


def read(device="cpu", **changed):
    return read_settings({**PARAMETERS, **changed}, torch.device(device))


def test_sampling_is_read_whole_and_what_is_not_given_has_its_default():
    assert GIVEN.keys() == SETTINGS.keys()
    read = Sampling(0.7, 40, 0.9, 0.05, -1, 2, 1.1, {12: -100, 7: 3.5}, -5, ("\n", "END"), (3, 4), True, 100, 0, 3, 5, True)
    read = replace(read, structured_outputs=StructuredOutputs(regex="a+"))
    assert sampling_of({}, json.dumps({**GIVEN, "min_tokens": 0})) == read
    assert sampling_of({}, json.dumps({**GIVEN, "structured_outputs": None})) == replace(
        read, min_tokens=2, structured_outputs=None
    )
    for nothing in (None, "", "{}", '{"temperature": null, "stop": null}'):
        assert sampling_of({}, nothing) == Sampling()
    assert sampling_of({"tenant": "a"}, '{"stop": "END", "top_k": -1}') == Sampling(stop=("END",), top_k=0), (
        "as vLLM sends them"
    )
    assert sampling_of({"tenant": "a", "top_k": 3}, None) == Sampling(top_k=3)


def test_settings_may_stand_in_json_and_beside_it_and_numbers_may_be_text():
    """As vLLM's sample client and genai-perf send them."""
    beside = {"max_tokens": "8", "temperature": 0.5, "ignore_eos": "true"}
    given = '{"temperature": "0.50", "max_tokens": 8, "n": "2", "stop": "7"}'
    expected = Sampling(temperature=0.5, max_tokens=8, n=2, stop=("7",), ignore_eos=True)
    assert sampling_of(beside, given) == expected == sampling_of({**beside, "n": "2", "stop": "7"}, None)
    assert sampling_of(beside, "") == sampling_of(beside, '{"max_tokens": null}') == replace(expected, n=1, stop=())
    with pytest.raises(InvalidInput, match=mentioning("'max_tokens'", 9, 8, "'sampling_parameters'")):
        sampling_of({"max_tokens": "9"}, '{"max_tokens": 8}')


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ('{"temprature": 1}', ["temprature", "temperature", "max_tokens"]),
        ('{"min_tokens": 9, "max_tokens": 3}', ["min_tokens", 9, "max_tokens", 3]),
        ('{"stop": 5}', ["stop", 5, "str", "array"]),
        (json.dumps(GIVEN), ["min_tokens", 2, "structured_outputs"]),
        ('{"structured_outputs": {}}', ["structured_outputs", "json", "json_object", "regex", "choice"]),
        ('{"structured_outputs": {"json": {}, "regex": "a"}}', ["structured_outputs", "one of"]),
        ('{"structured_outputs": {"jsn": {}}}', ["structured_outputs", "jsn"]),
        ('{"structured_outputs": {"json": []}}', ["structured_outputs", "object", "array"]),
        (json.dumps({"structured_outputs": {"json": {"const": "a" * 10**5}}}), ["structured_outputs", "100,013", "65,536"]),
        *[(json.dumps({"max_tokens": value}), ["max_tokens", value]) for value in ("many", "1.5", "nan", "-1", True)],
        *[(text, []) for text in ("{", "[1]", "5", '"x"', "[" * 100_000)],
    ],
)
def test_what_cannot_be_read_as_sampling_is_refused(given, named):
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        sampling_of({}, given)


def test_settings_are_read_and_refused_by_their_name():
    settings = read()
    found = settings.max_sequences, settings.step_tokens, settings.cache_tokens, settings.limits.work, settings.threads
    assert found == (4, 64, 512, 2_000_000, 3)
    assert settings.deadline_us == 1500
    assert settings.resident_rows == 0 and read("cuda").resident_rows == 7
    for name, value in map(str.split, ["max_sequences 0", "cache_tokens many", "deadline_ms -1"]):
        with pytest.raises(InvalidInput, match=name):
            read(**{name: value})
    with pytest.raises(InvalidInput, match="'max_sequences'"):
        read_settings({name: own for name, own in PARAMETERS.items() if name != "max_sequences"}, torch.device("cpu"))
