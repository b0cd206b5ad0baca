"""Sampling parameters: what is read, and what is refused with the name of the thing."""

import json

import pytest

from hplm.errors import InvalidInput
from hplm.generation.sampling import MOST_STOPS, READERS, Sampling, read_sampling
from tests.support.message import mentioning


def test_all_parameters_are_read():
    given = {
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.05,
        "presence_penalty": -1,
        "frequency_penalty": 2,
        "repetition_penalty": 1.1,
        "logit_bias": {"12": -100, "7": 3.5},
        "seed": -5,
        "stop": ["\n", "END"],
        "stop_token_ids": [3, 4],
        "ignore_eos": True,
        "max_tokens": 100,
        "min_tokens": 2,
        "n": 3,
        "logprobs": 5,
        "echo": True,
    }
    assert given.keys() == READERS.keys()
    read = read_sampling(json.dumps(given))
    assert read == Sampling(
        0.7, 40, 0.9, 0.05, -1, 2, 1.1, {12: -100, 7: 3.5}, -5, ("\n", "END"), (3, 4), True, 100, 2, 3, 5, True
    )


@pytest.mark.parametrize("given", [None, "", "{}", {}, '{"temperature": null, "stop": null}'])
def test_what_is_not_given_has_its_default(given):
    assert read_sampling(given) == Sampling()


def test_one_stop_string_and_all_tokens_as_vllm_sends_them():
    assert read_sampling('{"stop": "END", "top_k": -1}') == Sampling(stop=("END",), top_k=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        ("temperature", "0.7"),
        ("temperature", True),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("min_p", 1.5),
        ("presence_penalty", 3),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-39),
        ("repetition_penalty", 0.0099),
        ("logit_bias", [1]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": None}),
        ("logit_bias", {str(i): 0 for i in range(2000)}),
        ("seed", 2**63),
        ("seed", 0.5),
        ("stop", 5),
        ("stop", [""]),
        ("stop", ["a", 1]),
        ("stop", ["x"] * (MOST_STOPS + 1)),
        ("stop", ["x" * 10_000]),
        ("stop_token_ids", "1"),
        ("stop_token_ids", ["1"]),
        ("ignore_eos", 1),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("n", 0),
        ("n", 1000),
        ("logprobs", 21),
        ("logprobs", True),
        ("echo", "yes"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_parameter(name, value):
    with pytest.raises(InvalidInput, match=mentioning(name)):
        read_sampling({name: value})


def test_json_that_has_nan_is_refused():
    with pytest.raises(InvalidInput, match=mentioning("temperature")):
        read_sampling('{"temperature": NaN}')


def test_an_unknown_parameter_is_refused_with_those_there_are():
    with pytest.raises(InvalidInput, match=mentioning("temprature", "temperature", "max_tokens")):
        read_sampling('{"temprature": 1}')


@pytest.mark.parametrize("given", ["{", "[1]", "5", '"x"', "[" * 100_000])
def test_what_is_no_object_is_refused(given):
    with pytest.raises(InvalidInput):
        read_sampling(given)


def test_more_least_than_most_tokens_are_refused():
    with pytest.raises(InvalidInput, match=mentioning("min_tokens", 9, "max_tokens", 3)):
        read_sampling('{"min_tokens": 9, "max_tokens": 3}')


@pytest.mark.parametrize("given", ['{"logit_bias": {"100": 1}}', '{"stop_token_ids": [100]}', '{"stop_token_ids": [-1]}'])
def test_ids_outside_the_vocabulary_are_refused(given):
    sampling = read_sampling(given)
    sampling.check_ids(101) if "-1" not in given else None
    with pytest.raises(InvalidInput, match=mentioning(next(iter(json.loads(given))))):
        sampling.check_ids(100)
