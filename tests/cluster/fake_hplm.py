"""`hplm` whose `serve` is a fake of Triton: `python -m tests.cluster.fake_hplm cluster up ...`. It starts in no time.

A file in the cluster's folder tells the fakes what to do: `held` keeps all requests, `draining` keeps fakes that are told to
end, with `broken` none starts.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

PROGRAM = (sys.executable, "-m", "tests.cluster.fake_hplm")
HELD, DRAINING, BROKEN = "held", "draining", "broken"


def _serve(words: list[str]) -> None:
    from tests.cluster.fake_server import FakeServer
    from tests.support.wait import eventually

    log, http, grpc = (words[words.index(flag) + 1] for flag in ("--log-file", "--http-port", "--grpc-port"))
    folder, ended = Path(log).parents[1], threading.Event()

    class Fake(FakeServer):
        def take(self, headers: dict[str, str], size: int) -> None:
            super().take(headers, size)
            eventually(lambda: not (folder / HELD).exists())

    if (folder / BROKEN).exists():
        sys.exit(BROKEN)
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    Fake(os.environ["HPLM_READER"], ports=(int(http), int(grpc)))
    print("Ready", flush=True)
    ended.wait()
    print("it drains", flush=True)
    eventually(lambda: not (folder / DRAINING).exists())
    print("drained", flush=True)


def _other(words: list[str]) -> int:
    from hplm.cli.main import main
    from hplm.cluster import running

    running.HPLM = PROGRAM
    return main(words)


if __name__ == "__main__":
    sys.exit(_serve(sys.argv[2:]) if sys.argv[1] == "serve" else _other(sys.argv[1:]))
