"""Deadlines count from the time that the front door says. `test_limits` shows that this is a request's arrival there."""

import time

import pytest
from tritonclient.utils import InferenceServerException

from hplm_client.errors import DeadlineMissed, refusal
from testing.toy import WORDS
from tests.server.stock import LIBRARIES
from tests.support.servers import published
from tests.support.wait import eventually

pytestmark = [pytest.mark.slow, pytest.mark.server("toy")]

BEFORE_LOOKUP = "hplm_before_lookup_seconds"


def ask(stock, model, timeout=None, **more):
    """Returns the error or None."""
    try:
        stock.ask([WORDS[0]], "acme", model=model, timeout=timeout, **more)
    except InferenceServerException as error:
        return refusal(error.message(), error.status())
    return None


@pytest.mark.parametrize("protocol", LIBRARIES)
@pytest.mark.parametrize("model", ["toy", "hplm"])
def test_a_client_of_the_server_can_only_shorten_its_own_time_and_metrics_tell_how_long_it_has_waited(server, protocol, model):
    stock, now_us = server.stock(protocol), time.time_ns() // 1000
    before = {name: published(server, f"{BEFORE_LOOKUP}_{name}") for name in ("sum", "count")}
    for said, expected in (
        (now_us - 50_000_000, DeadlineMissed),
        (now_us + 20_000_000, type(None)),  # it would have the more time
        (1, type(None)),  # no clock of a door
    ):
        error = ask(stock, model, 15_000_000, headers={"hplm-arrived": str(said)})
        assert isinstance(error, expected), (said, error)
    assert "hplm-arrived" in str(ask(stock, model, headers={"hplm-arrived": "soon"}))
    assert ask(stock, model, headers={"hplm-arrived": str(now_us - 50_000_000)}) is None
    eventually(lambda: published(server, f"{BEFORE_LOOKUP}_count") > before["count"])
    eventually(lambda: published(server, f"{BEFORE_LOOKUP}_sum") > before["sum"] + 50)
