"""Reading of what a request for text asks for, and of the settings of a model. The contract's tables have single values."""

import json

import pytest
import torch

from hplm.errors import InvalidInput
from hplm.generation.sampling import SETTINGS, Sampling, read_sampling, sampling_of
from hplm.generation.settings import NO_PROMISE, Promise, promise_of, read_settings
from tests.support.message import mentioning

GIVEN = {
    "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "presence_penalty": -1, "frequency_penalty": 2,
    "repetition_penalty": 1.1, "logit_bias": {"12": -100, "7": 3.5}, "seed": -5, "stop": ["\n", "END"],
    "stop_token_ids": [3, 4], "ignore_eos": True, "max_tokens": 100, "min_tokens": 2, "n": 3, "logprobs": 5, "echo": True,
}  # fmt: skip
PARAMETERS = {
    "max_sequences": "4", "step_tokens": "64", "cache_tokens": "512", "policy": "timely",
    "admission": "true", "queue_texts": "10", "queue_mb": "2", "deadline_ms": "1.5", "first_token_ms": "0", "token_ms": "2",
    "plot_hot": "7", "threads": "3", "dtype": "fp32",
}  # fmt: skip


def read(device="cpu", **changed):
    return read_settings({**PARAMETERS, **changed}, torch.device(device))


def test_sampling_is_read_whole_and_what_is_not_given_has_its_default():
    assert GIVEN.keys() == SETTINGS.keys()
    assert read_sampling(json.dumps(GIVEN)) == Sampling(
        0.7, 40, 0.9, 0.05, -1, 2, 1.1, {12: -100, 7: 3.5}, -5, ("\n", "END"), (3, 4), True, 100, 2, 3, 5, True
    )
    for nothing in (None, "", "{}", {}, '{"temperature": null, "stop": null}'):
        assert read_sampling(nothing) == Sampling()
    assert sampling_of({"tenant": "a"}, '{"stop": "END", "top_k": -1}') == Sampling(stop=("END",), top_k=0), (
        "as vLLM sends them"
    )
    assert sampling_of({"tenant": "a", "top_k": 3}, None) == Sampling(top_k=3)
    with pytest.raises(InvalidInput, match=mentioning("'top_k'", "'sampling_parameters'")):
        sampling_of({"top_k": 3}, '{"top_p": 0.5}')


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ('{"temprature": 1}', ["temprature", "temperature", "max_tokens"]),
        ('{"min_tokens": 9, "max_tokens": 3}', ["min_tokens", 9, "max_tokens", 3]),
        *[(text, []) for text in ("{", "[1]", "5", '"x"', "[" * 100_000)],
    ],
)
def test_what_cannot_be_read_as_sampling_is_refused(given, named):
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        read_sampling(given)


def test_promises_come_from_the_request():
    assert promise_of({}, 0) == NO_PROMISE
    assert promise_of({"timeout": 7}, 0) == promise_of({"timeout": 9}, 7) == Promise(whole_ns=7000)
    assert promise_of({"first_token_ms": 2.5, "token_ms": "0.5"}, 0) == Promise(0, 2_500_000, 500_000)
    assert promise_of({}, 2**63 - 1).whole_ns < 2**63


def test_settings_are_read_and_refused_by_their_name():
    settings = read()
    found = settings.max_sequences, settings.step_tokens, settings.cache_tokens, settings.limits.work, settings.threads
    assert found == (4, 64, 512, 2_000_000, 3)
    assert settings.promise == Promise(1_500_000, 0, 2_000_000)
    assert settings.least_token_ns == 0 and read(least_token_ms="2").least_token_ns == 2_000_000
    of_older = {"seats" if name == "max_sequences" else name: value for name, value in PARAMETERS.items()}
    assert read_settings({**of_older, "cleaning": "early", "cache": "slotted"}, torch.device("cpu")) == settings
    assert settings.resident_rows == 0 and read("cuda").resident_rows == 7
    wrong = ["max_sequences 0", "cache_tokens many", "cache dense", "cleaning batch", "admission 1", "token_ms -1"]
    for name, value in map(str.split, [*wrong, "least_token_ms 3"]):  # more than the backbone's own
        with pytest.raises(InvalidInput, match=name):
            read(**{name: value})
    with pytest.raises(InvalidInput, match="'max_sequences'"):
        read_settings({name: own for name, own in PARAMETERS.items() if name != "max_sequences"}, torch.device("cpu"))
