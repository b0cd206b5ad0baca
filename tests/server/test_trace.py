"""Triton's own trace beside our journal: both contain a request under the client's id."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from testing.toy import WORDS
from tests.server.stock import Stock
from tests.support.servers import serving

pytestmark = pytest.mark.slow


def test_a_request_is_in_triton_s_trace_and_in_the_journal(toy, tmp_path):
    journal, trace = tmp_path / "journal.jsonl", tmp_path / "trace.json"
    export(toy.store, tmp_path / "repository", ServingOptions(dtype="fp32", slots=4, batch_tokens=256, journal=str(journal)))
    settings = ("mode=triton", f"triton,file={trace}", "triton,log-frequency=1", "rate=1", "level=TIMESTAMPS")
    with serving(tmp_path / "repository", extra_args=[f"--trace-config={one}" for one in settings]) as server:
        stock = Stock(server, "grpc")
        text = stock.tensor("TEXT", np.array([[WORDS[0].encode()]], dtype=object))
        stock.client.infer("toy", [text], request_id="ours-21", parameters={"tenant": "acme"})
        _wait_until_traced(trace, "ours-21", {"toy", "toy-lookup", "toy-upper"})
    (written,) = [entry for line in journal.read_text("utf-8").splitlines() if (entry := json.loads(line)).get("request")]
    assert (written["request"], written["outcome"]) == ("ours-21", "answered")


def _wait_until_traced(trace: Path, request: str, models: set[str], timeout: float = 60) -> None:
    """Waits until Triton has written the trace, which may be after the client has its answer."""
    deadline, found = time.monotonic() + timeout, set()
    while found != models:
        assert time.monotonic() < deadline, f"of {request} only {found} are traced"
        for written in trace.parent.glob(f"{trace.name}.*"):
            try:
                entries = json.loads(written.read_text("utf-8"))
            except json.JSONDecodeError:  # half written
                continue
            found |= {entry["model_name"] for entry in entries if entry.get("request_id") == request}
        time.sleep(0.1)
