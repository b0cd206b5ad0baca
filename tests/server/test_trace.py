"""Triton's own trace beside our journal: one request in both, by the id that the client gave it."""

import json
import time
from pathlib import Path

import numpy as np

from builder.export import export
from builder.model_configs import ServingOptions
from hplm.server import TritonServer
from tests.server.stock import Stock
from tests.toy import WORDS


def test_a_request_is_in_triton_s_trace_and_in_the_journal(toy, tmp_path):
    journal, trace = tmp_path / "journal.jsonl", tmp_path / "trace.json"
    export(toy.store, tmp_path / "repository", ServingOptions(dtype="fp32", slots=4, batch_tokens=256, journal=str(journal)))
    settings = ("mode=triton", f"triton,file={trace}", "triton,log-frequency=1", "rate=1", "level=TIMESTAMPS")
    with TritonServer(tmp_path / "repository", extra_args=[f"--trace-config={one}" for one in settings]) as server:
        stock = Stock(server, "grpc")
        text = stock.tensor("TEXT", np.array([[WORDS[0].encode()]], dtype=object))
        stock.client.infer("toy", [text], request_id="ours-21", parameters={"tenant": "acme"})
        assert _models_traced(trace, "ours-21") == {"toy", "toy-lookup", "toy-upper"}
    (written,) = [entry for line in journal.read_text("utf-8").splitlines() if (entry := json.loads(line)).get("request")]
    assert (written["request"], written["outcome"]) == ("ours-21", "answered")


def _models_traced(trace: Path, request: str, timeout: float = 60) -> set[str]:
    """Of one request. Triton begins a file for each trace, and has not closed it by the time that the client is answered."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for written in trace.parent.glob(f"{trace.name}.*"):
            try:
                entries = json.loads(written.read_text("utf-8"))
            except json.JSONDecodeError:  # half written
                continue
            if models := {entry["model_name"] for entry in entries if entry.get("request_id") == request}:
                return models
        time.sleep(0.1)
    raise AssertionError(f"no trace of {request} within {timeout:.0f} s")
