"""The smallest request for a model, and what an answer to it means."""

import json

import pytest

from hplm.errors import HplmError
from hplm.server import probing
from hplm.server.control import Control
from hplm.server.probing import State
from tests.support.message import mentioning


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
    assert [one["name"] for one in json.loads(probing.probe_of(optional).body)["inputs"]] == ["PAIR"]
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


class Played(Control):
    """A server that does not know its model's configuration."""

    def __init__(self):
        super().__init__("127.0.0.1", 1, {})
        self.asked = []

    def _ask(self, port, method, path, body=None, timeout=5.0):
        self.asked.append(path)
        return 400, b'{"error": "Request for unknown model: \'toy\' has no available versions"}'


def test_a_model_whose_configuration_cannot_be_read_has_no_probe_and_is_not_loaded_with_an_empty_one():
    """Triton would answer a probe without inputs, whether the model lives or not."""
    server = Played()
    with pytest.raises(HplmError, match=mentioning("toy", 400, "no available versions")):
        server.probes(["toy"])
    server.asked.clear()
    assert not server.revive("toy") and server.asked == ["/v2/models/toy/config"]
