"""The smallest request for a model, and what an answer to it means."""

import json

import pytest

from hplm.server import log, probing
from hplm.server.probing import State


def test_a_probe_has_every_required_input_with_the_least_values():
    config = {
        "max_batch_size": 8,
        "input": [
            {"name": "TEXT", "data_type": "TYPE_STRING", "dims": ["1"]},
            {"name": "PAIR", "data_type": "TYPE_STRING", "dims": ["1"], "optional": True},
            {"name": "IDS", "data_type": "TYPE_INT64", "dims": ["-1", "2"]},
            {"name": "FLAG", "data_type": "TYPE_BOOL", "dims": ["1"]},
        ],
    }
    probe = probing.probe_of(config)
    assert probe.path == "infer"
    assert json.loads(probe.body) == {
        "parameters": {"hplm_probe": True},
        "inputs": [
            {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": [""]},
            {"name": "IDS", "shape": [1, 1, 2], "datatype": "INT64", "data": [0, 0]},
            {"name": "FLAG", "shape": [1, 1], "datatype": "BOOL", "data": [False]},
        ],
    }
    assert json.loads(probing.probe_of({**config, "max_batch_size": 0}).body)["inputs"][1]["shape"] == [1, 2]
    optional = {"input": config["input"][1:2], "max_batch_size": 8}
    assert json.loads(probing.probe_of(optional).body)["inputs"] == [
        {"name": "PAIR", "shape": [1, 1], "datatype": "BYTES", "data": [""]}
    ]
    generating = {"model_transaction_policy": {"decoupled": True}, "input": config["input"][:2]}
    assert probing.probe_of(generating) == probing.Probe("generate", b'{"hplm_probe": true, "TEXT": ""}')


@pytest.mark.parametrize(
    ("status", "said", "state"),
    [
        (200, "", State.WORKS),
        (404, "[no_tenant] no such tenant", State.WORKS),
        (500, "Failed to process the request(s): a model's own exception", State.WORKS),
        (503, "[draining] the engine is being started again", State.BUSY),
        (500, "[internal] the loop has failed 100 times in a row", State.BROKEN),
        (500, "[broken] a table does not match its checksum", State.BROKEN),
        (503, "[capacity] the device has no memory", State.BUSY),
        (500, "Stub process 'toy-lookup_0_0' is not healthy.", State.DEAD),
        (500, "", State.DEAD),
        (400, "Request for unknown model: 'toy' has no available versions", State.UNLOADED),
    ],
)
def test_what_an_answer_means(status, said, state):
    assert probing.health(status, json.dumps({"error": said}).encode() if said else b"").state is state


def test_a_log_that_is_too_large_keeps_its_end_in_a_second_file_and_is_written_on(tmp_path, monkeypatch):
    monkeypatch.setattr(log, "LARGEST", 1000)
    monkeypatch.setattr(log, "_KEPT", 100)
    path = tmp_path / "serve.log"
    with path.open("ab", buffering=0) as server:
        server.write(b"a" * 900)
        assert not log.rotate(path)
        server.write(b"b" * 200)
        assert log.rotate(path)
        server.write(b"c" * 10)
    assert path.read_bytes() == b"c" * 10
    assert (tmp_path / "serve.log.1").read_bytes() == b"b" * 100
