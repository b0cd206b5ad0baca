import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bench.serve import ServeBench
from bench.tools import wrk
from bench.tools.wrk import Wrk, load_by_wrk, read_report
from hplm.cli.main import main
from hplm.errors import HplmError
from loadtest.encode import http_request
from tests.support.message import mentioning

REPORT = """Running 2s test @ http://127.0.0.1:1
  Latency Distribution
     50%   12.50ms
     99%    1.20s
  4 requests in 2.00s, 1KB read
Requests/sec:    199.50
"""


def test_a_report_is_read():
    assert read_report(REPORT) == Wrk(199.5, 12.5)
    assert read_report(REPORT.replace("12.50ms", "1.25s")).p50_ms == 1250


@pytest.mark.parametrize("line", ["  Non-2xx or 3xx responses: 7", "  Socket errors: connect 0, read 3, write 0, timeout 0"])
def test_failed_requests_are_no_figure(line):
    with pytest.raises(HplmError, match=mentioning(line.strip())):
        read_report(REPORT + line)


def test_a_missing_wrk_is_named_before_anything_is_built(monkeypatch, capsys):
    monkeypatch.setattr(wrk.shutil, "which", lambda name: None)
    assert main(["bench", "serve", "--wrk"]) != 0
    assert "apt-get install wrk" in capsys.readouterr().err
    assert not ServeBench().wrk


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed")
def test_wrk_sends_the_same_bytes_in_turn():
    seen, bodies = set(), [b"\0\n\"'\\ %1", bytes(range(256))]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            seen.add((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *given):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        report = load_by_wrk(f"127.0.0.1:{server.server_port}", [http_request("/a", body) for body in bodies], 2, 1)
    finally:
        server.shutdown()
        server.server_close()
    assert report.req_per_s > 0
    assert seen == {("/a", body) for body in bodies}
