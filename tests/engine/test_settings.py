"""Settings of operators are checked, and errors name the parameter."""

import pytest
import torch

from hplm.engine.engine import resolve_precision
from hplm.engine.settings import AUTO_ON_CPU, Settings
from hplm.errors import InvalidInput
from hplm.parameters import deadline_us
from tests.engine.asker import PARAMETERS
from tests.support.message import mentioning


@pytest.mark.parametrize(
    "name, value",
    [
        ("device", "tpu9"), ("dtype", "fp8"), ("slots", "1"), ("batch_tokens", "many"), ("queue_mb", "0"),
        ("commit_ms", "soon"), ("commit_ms", "-1"), ("commit_ms", "nan"), ("batch_ms", "-5"),
        ("overlap", "none"), ("admission", "perhaps"),
        ("journal", "journal.jsonl"),
    ],
)  # fmt: skip
def test_a_parameter_that_makes_no_sense_is_refused_by_name(name, value):
    with pytest.raises(InvalidInput, match=mentioning(name, f"'{value}'")):
        Settings.read({**PARAMETERS, name: value})


@pytest.mark.parametrize("value", ["-5", "nan", "inf", "soon"])
def test_a_deadline_that_makes_no_sense_is_refused_by_name(value):
    with pytest.raises(InvalidInput, match=mentioning("'deadline_ms'", f"'{value}'")):
        deadline_us({"deadline_ms": value})


def test_auto_is_on_a_cpu_what_was_measured_at_the_export():
    assert Settings.read({**PARAMETERS, "dtype": "auto", AUTO_ON_CPU: "int8"}).precision.name == "int8"
    assert Settings.read({**PARAMETERS, "dtype": "fp32", AUTO_ON_CPU: "int8"}).precision.name == "fp32"


def test_eight_bits_are_refused_on_a_gpu():
    with pytest.raises(InvalidInput, match=mentioning("int8", "cuda")):
        resolve_precision("int8", torch.device("cuda"))
    assert not resolve_precision("bf16", torch.device("cuda"), auto_on_cpu="int8").eight_bits
