"""Reading of what a request for text asks for, and of the settings of a model that answers it."""

import pytest
import torch

from hplm.errors import InvalidInput
from hplm.generation.asked import promise_of, sampling_of
from hplm.generation.promise import NO_PROMISE, Promise
from hplm.generation.sampling import Sampling
from hplm.generation.settings import read_settings
from tests.support.message import mentioning

PARAMETERS = {
    "seats": "4", "step_tokens": "64", "cache_tokens": "512", "cache": "auto", "cleaning": "early", "policy": "timely",
    "admission": "true",
    "queue_texts": "10", "queue_mb": "2", "deadline_ms": "1.5", "first_token_ms": "0", "token_ms": "2", "plot_hot": "7",
    "threads": "3",
}  # fmt: skip


def read(device="cpu", **changed):
    return read_settings({**PARAMETERS, **changed}, torch.device(device), torch.float32)


def test_sampling_comes_from_json_or_from_parameters():
    assert sampling_of({"tenant": "a"}, None) == sampling_of({}, "{}") == Sampling()
    assert sampling_of({"top_k": 3, "tenant": "a"}, None) == sampling_of({"tenant": "a"}, '{"top_k": 3}') == Sampling(top_k=3)
    with pytest.raises(InvalidInput, match=mentioning("'top_k'", "'sampling_parameters'")):
        sampling_of({"top_k": 3}, '{"top_p": 0.5}')


def test_promises_come_from_the_request():
    assert promise_of({}, 0) == NO_PROMISE
    assert promise_of({"timeout": 7}, 0) == promise_of({"timeout": 9}, 7) == Promise(whole_ns=7000)
    assert promise_of({"first_token_ms": 2.5, "token_ms": "0.5"}, 0) == Promise(0, 2_500_000, 500_000)
    assert promise_of({}, 2**63 - 1).whole_ns < 2**63


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout", -1),
        ("timeout", 1.5),
        ("token_ms", True),
        ("token_ms", "x"),
        ("first_token_ms", "nan"),
        ("first_token_ms", -1),
    ],
)
def test_times_out_of_range_are_refused(name, value):
    with pytest.raises(InvalidInput, match=name):
        promise_of({name: value}, 0)


def test_settings_are_read():
    settings = read()
    assert (settings.seats, settings.step_tokens, settings.cache_tokens, settings.queue_bytes) == (4, 64, 512, 2_000_000)
    assert settings.threads == 3
    assert settings.promise == Promise(1_500_000, 0, 2_000_000)
    assert settings.cache == "auto" and read(cache="paged").cache == "paged"
    assert settings.resident_rows == 0 and read("cuda").resident_rows == 7


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seats", "0"), ("cache_tokens", "many"), ("cache", "dense"), ("cleaning", "never"), ("admission", "1"),
        ("token_ms", "-1"),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(InvalidInput, match=name):
        read(**{name: value})


def test_a_missing_setting_is_named():
    with pytest.raises(InvalidInput, match="'seats'"):
        read_settings(
            {name: value for name, value in PARAMETERS.items() if name != "seats"}, torch.device("cpu"), torch.float32
        )
