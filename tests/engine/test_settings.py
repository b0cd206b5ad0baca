"""Settings of operators are checked, and errors name the parameter."""

from dataclasses import replace

import pytest
import torch

from hplm.engine.engine import resolve_precision
from hplm.engine.settings import AUTO_ON_CPU, EncoderSettings, read_all
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
    ({"backbones": "a b a"}, ["'a b a'", "once"]), ({"backbones": "a ../b"}, ["'a ../b'"]),
    ({"stages": TWO, "backbones": "a b"}, ["1 backbones", "a, b", "semicolon"]),
    ({"stages": f"{TWO}; 0-3@cpu:0", "backbones": "a b"}, ["same devices"]),
    ({"stages": f"{TWO}; 0-1@cpu:1 2-3@cpu:0", "backbones": "a b"}, ["same order"]),
]  # fmt: skip


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})


@pytest.mark.parametrize("changed, named", REFUSED, ids=str)
def test_parameters_that_make_no_sense_are_refused_by_name(changed, named):
    name, value = next(iter(changed.items()))
    with pytest.raises(InvalidInput, match=mentioning(name, *(named or [f"'{value}'"]))):
        read_all({**PARAMETERS, "backbone": "a", **changed})


def test_auto_is_on_a_cpu_what_was_measured_at_the_export():
    assert EncoderSettings.read({**PARAMETERS, "dtype": "auto", AUTO_ON_CPU: "int8"}).precision.name == "int8"
    assert EncoderSettings.read({**PARAMETERS, "dtype": "fp32", AUTO_ON_CPU: "int8"}).precision.name == "fp32"


def test_eight_bits_are_refused_on_a_gpu():
    with pytest.raises(InvalidInput, match=mentioning("int8", "cuda")):
        resolve_precision("int8", torch.device("cuda"))
    assert not resolve_precision("bf16", torch.device("cuda"), auto_on_cpu="int8").eight_bits


def test_the_settings_of_several_backbones_differ_in_their_stages_alone():
    given = {**PARAMETERS, "backbone": "a", "backbones": "a b", "stages": "0-1@cpu:0 2-3@cpu:1; 0-4@cpu:0 5-5@cpu:1"}
    found = read_all(given)
    assert [[(stage.first, stage.last) for stage in own.stages] for own in found.values()] == [
        [(0, 1), (2, 3)],
        [(0, 4), (5, 5)],
    ]
    assert replace(found["a"], stages=()) == replace(found["b"], stages=())
    assert [own.stages for own in read_all({**given, "stages": ""}).values()] == [(), ()]
    assert list(read_all({**PARAMETERS, "backbone": "a"})) == ["a"]
