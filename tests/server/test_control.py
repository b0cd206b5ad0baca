"""The control reads models and their configurations over HTTP. The answers are played here."""

import json

import pytest

from hplm.errors import HplmError
from hplm.server.control import Control
from tests.support.message import mentioning

UNKNOWN = 400, b'{"error": "Request for unknown model: \'toy\' has no available versions"}'


class Played(Control):
    """The answers of a server, by the end of the path."""

    def __init__(self, **answers):
        super().__init__("127.0.0.1", 1, {})
        self.answers, self.asked = answers, []

    def _ask(self, port, method, path, body=None, timeout=5.0):
        self.asked.append(path)
        return self.answers.get(path.rpartition("/")[2], (200, b"{}"))


def test_a_model_whose_configuration_cannot_be_read_has_no_probe():
    """Triton would answer one without inputs, whether the model lives or not."""
    with pytest.raises(HplmError, match=mentioning("toy", 400, "no available versions")):
        Played(config=UNKNOWN).probes(["toy"])
    config = json.dumps({"input": [{"name": "TEXT", "data_type": "TYPE_STRING", "dims": ["1"]}]}).encode()
    assert b"TEXT" in Played(config=(200, config)).probes(["toy"])["toy"].body


def test_such_a_model_is_not_loaded_with_an_empty_configuration():
    server = Played(config=UNKNOWN)
    assert not server.revive("toy")
    assert server.asked == ["/v2/models/toy/config"]
