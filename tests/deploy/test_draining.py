"""A server that drains, of two behind the front door: the real HAProxy before stand-ins for Triton."""

import csv

import pytest

from tests.deploy.door import command, haproxy, require_haproxy
from tests.deploy.stand_in import Held, grpc_stand_in, http_stand_in
from tests.waiting import eventually

pytestmark = pytest.mark.slow

INFER, BODY = "/v2/models/toy/infer", b'{"inputs":[{"name":"TEXT","shape":[1,1],"datatype":"BYTES","data":["a"]}]}'


def test_with_little_load_too_a_refusal_makes_the_door_ask_the_server_that_gave_it(tmp_path):
    """The stand-in answers the checks themselves."""
    require_haproxy()
    old, new = Held(larger_than=10**6), Held(larger_than=10**6)
    socket = tmp_path / "socket"
    with http_stand_in(old) as http, http_stand_in(new) as http_2, grpc_stand_in(old) as grpc, grpc_stand_in(new) as grpc_2:
        second = {"HPLM_HTTP_2": http_2, "HPLM_GRPC_2": grpc_2, "HPLM_DOOR_SOCKET": socket}
        with haproxy(tmp_path / "door", http, grpc, "toy", **second) as door:
            eventually(lambda: door.post(INFER, BODY).status == 200)
            old.refusal = "[draining] the server is shutting down"
            eventually(lambda: door.post(INFER, BODY).status == 503)
            eventually(lambda: asked_for_refusals(socket, "one"))
            assert not asked_for_refusals(socket, "two")


def asked_for_refusals(socket, server):
    """Returns how often a refused request made the door ask the server."""
    rows = csv.DictReader(command(socket, "show stat").removeprefix("# ").splitlines())
    (found,) = [row for row in rows if (row["pxname"], row["svname"]) == ("few_http", server)]
    return int(found["hanafail"] or 0)
