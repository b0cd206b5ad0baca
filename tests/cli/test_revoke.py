"""`hplm tenant key revoke --wait --servers` ends as soon as the named servers refuse the key, by what their metrics say."""

import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hplm.tenants import taken
from tests.cli.commands import refused, run
from tests.support.message import mentions

pytestmark = pytest.mark.slow


@contextmanager
def metrics(generation):
    """A server whose metrics say what `generation` returns. Yields its address."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self):
            said = f'hplm_registry_generation{{backbone="toy",model="x"}} {generation()}\n'
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f'# HELP\nhplm_registry_generation{{backbone="other"}} 99\n{said}'.encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield "127.0.0.1:{1}".format(*server.server_address)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_it_ends_when_all_of_them_have_taken_the_change_and_names_those_that_have_not(live, capsys, monkeypatch):
    (_, places), (kept, gone) = live, [live.manager.add_key("tenant-0")[1].id for _ in range(2)]
    monkeypatch.setattr(taken, "LOOK_SECONDS", 0.01)
    looks, began = [], live.manager.current().generation

    def late():
        looks.append(live.manager.current().generation)
        return began if len(looks) < 4 else f"{looks[-1]:.1f}"

    with metrics(late) as one, metrics(lambda: live.manager.current().generation) as two:
        words = ["tenant", "key", "revoke", "tenant-0", "--key", gone, *places]
        for wrong in (["--servers", one], ["--wait", "--servers", "nowhere"]):
            assert mentions(refused(capsys, *words, *wrong), "--servers") and live.manager.current().generation == began
        said = run(capsys, *words, "--wait", "--servers", one, two)
        assert said["behind"] == [] and len(looks) == 4 and said["dead_at"] > time.time()
        assert taken.wait_until_taken([one], "nobody", 1, until=0) == [one]
    assert taken.wait_until_taken([one, two], "toy", 1, until=0) == [one, two]  # they are gone
    assert [key.id for key in live.manager.current().find("tenant-0").keys] == [kept]
