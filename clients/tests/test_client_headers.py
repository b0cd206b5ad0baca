"""Every request carries the header that names its tenant to proxies. The servers here refuse whatever they get."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest
from client_stand_ins import grpc_server
from client_ways import WAYS, Way

from hplm_client import InvalidInput
from hplm_client.settings import Settings

REFUSAL = "[invalid_input] as always"
KEY = {"authorization": "Bearer K3Y"}


@contextmanager
def over_http(seen):
    class Refusing(BaseHTTPRequestHandler):
        def do_POST(self):
            seen.append({name.lower(): value for name, value in self.headers.items()})
            self.rfile.read(int(self.headers["Content-Length"]))
            body = f'{{"error":"{REFUSAL}"}}'.encode()
            self.send_response(400)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def over_grpc(seen):
    def refuse(_, context):
        seen.append(dict(context.invocation_metadata()))
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, REFUSAL)

    return grpc_server(refuse)


def first_piece(client):
    pieces = client.stream("a", tenant="acme")
    return anext(pieces) if hasattr(pieces, "__anext__") else next(pieces)


CALLS = {
    "infer": lambda client: client.infer("a", tenant="acme"),
    "generate": lambda client: client.generate("a", tenant="acme"),
    "stream": first_piece,
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("call", CALLS)
def test_every_request_names_its_tenant_in_a_header(name, call):
    protocol, _, is_async = name.partition("-")
    seen = []
    with (over_http if protocol == "http" else over_grpc)(seen) as url, pytest.raises(InvalidInput):
        Way(protocol, bool(is_async)).call(url, CALLS[call], backbone="toy", api_key="K3Y")
    assert seen[0].items() >= {"hplm-tenant": "acme", **KEY}.items()


@pytest.mark.parametrize("name", ["grpc", "grpc-asyncio"])
def test_a_call_that_ends_before_its_prompt_is_sent_raises_the_error_of_the_server(name):
    long = "a" * 10_000_000  # more than the server takes before it reads
    with over_grpc([]) as url:
        for _ in range(5):
            with pytest.raises(InvalidInput):
                Way("grpc", name != "grpc").call(url, lambda client: client.generate(long, tenant="acme"), backbone="toy")


@pytest.mark.parametrize("tenant", [None, 7, "", "a b", "é", "a\r\nx: y"])
def test_a_name_that_is_no_value_of_a_header_is_not_sent_in_one(tenant):
    assert Settings("a:1", api_key="K3Y").headers_for({"tenant": tenant} if tenant is not None else {}) == KEY
