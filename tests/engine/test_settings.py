"""Settings of operators are checked, and errors name the parameter."""

import pytest

from hplm.engine.settings import Settings, deadline_us
from hplm.errors import InvalidInput
from tests.engine.asker import PARAMETERS
from tests.naming import naming


@pytest.mark.parametrize(
    "name, value",
    [
        ("device", "tpu9"), ("dtype", "fp8"), ("slots", "1"), ("batch_tokens", "many"), ("queue_mb", "0"),
        ("commit_ms", "soon"), ("commit_ms", "-1"), ("commit_ms", "nan"), ("overlap", "none"), ("admission", "perhaps"),
        ("journal", "journal.jsonl"),
    ],
)  # fmt: skip
def test_a_parameter_that_makes_no_sense_is_refused_by_name(name, value):
    with pytest.raises(InvalidInput, match=naming(name, f"'{value}'")):
        Settings.read({**PARAMETERS, name: value})


@pytest.mark.parametrize("value", ["-5", "nan", "inf", "soon"])
def test_a_deadline_that_makes_no_sense_is_refused_by_name(value):
    with pytest.raises(InvalidInput, match=naming("'deadline_ms'", f"'{value}'")):
        deadline_us({"deadline_ms": value})


def test_a_deadline_is_read_in_microseconds():
    assert [deadline_us({"deadline_ms": value}) for value in ("0", "2.5")] == [0, 2500]


def test_a_repository_without_a_parameter_must_be_exported_again():
    with pytest.raises(InvalidInput, match=naming("'packing'", "config.pbtxt")):
        Settings.read({name: value for name, value in PARAMETERS.items() if name != "packing"})
