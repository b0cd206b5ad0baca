"""Settings of operators are checked, and errors name the parameter."""

import pytest
import torch

from hplm.engine.engine import resolve_precision
from hplm.engine.settings import AUTO_ON_CPU, EncoderSettings
from hplm.errors import InvalidInput
from tests.engine.asker import PARAMETERS
from tests.support.message import mentioning

TWO = "0-1@cpu:0 2-4@cpu:1"
# What is changed, and what the message names beside the parameter, if not its value. `tests/refusals` reads the others.
REFUSED = [
    ({"device": "tpu9"}, []), ({"device": "meta"}, ["meta", "cuda:N"]), ({"dtype": "fp8"}, []), ({"slots": "1"}, []),
    ({"journal": "journal.jsonl"}, []),
    ({"stages": "0-1"}, ["FIRST-LAST"]), ({"stages": "0-1@tpu:0"}, ["tpu"]), ({"stages": "0-1@cpu"}, []),
    ({"stages": "1-2@cpu:0"}, ["before 1"]), ({"stages": "2-1@cpu:0"}, []), ({"stages": "0-1@cpu:99999"}, ["cores"]),
    ({"stages": "0-1@cuda:99999"}, ["cuda:99999"]), ({"stages": "0-1@cpu:0 2-3@cpu:0"}, ["cpu:0", "twice"]),
    ({"stages": "0-1@cpu:0 3-4@cpu:1"}, ["between 1 and 3"]), ({"stages": "0-1@cpu:0 1-4@cpu:1"}, ["twice"]),
    ({"stages": "0-1@cpu:0 0-1@cpu:1"}, ["order"]),
    ({"device": "cuda", "stages": TWO}, []), ({"threads": "2", "stages": TWO}, []),
    ({"slots": "2", "stages": TWO}, []),
]  # fmt: skip


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})


@pytest.mark.parametrize("changed, named", REFUSED, ids=str)
def test_parameters_that_make_no_sense_are_refused_by_name(changed, named):
    name, value = next(iter(changed.items()))
    with pytest.raises(InvalidInput, match=mentioning(name, *(named or [f"'{value}'"]))):
        EncoderSettings.read({**PARAMETERS, **changed})


def test_auto_is_on_a_cpu_what_was_measured_at_the_export():
    assert EncoderSettings.read({**PARAMETERS, "dtype": "auto", AUTO_ON_CPU: "int8"}).precision.name == "int8"
    assert EncoderSettings.read({**PARAMETERS, "dtype": "fp32", AUTO_ON_CPU: "int8"}).precision.name == "fp32"


def test_eight_bits_are_refused_on_a_gpu():
    with pytest.raises(InvalidInput, match=mentioning("int8", "cuda")):
        resolve_precision("int8", torch.device("cuda"))
    assert not resolve_precision("bf16", torch.device("cuda"), auto_on_cpu="int8").eight_bits
