"""Measures infinity-emb and our server with the same texts and a MiniLM of random weights, in turn.

infinity-emb is measured before and after our servers; `infinity_drift` shows whether the machine has changed its speed.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import BertConfig, BertModel

from bench.infinity import InfinityBench
from bench.measuring.serve import load_server, texts_of
from bench.measuring.tenants import bench_tenants
from bench.serve import ServeBench
from hplm.engine.engine import resolve_device, resolve_precision
from hplm.errors import HplmError
from loadtest.encode import json_request
from loadtest.load import Report
from testing.random_store import MINILM, tokenizer_json

PACKAGE = "infinity-emb[torch,server]==0.0.78"
START_S = 180.0
MODEL = "minilm"


def bench_infinity(case: InfinityBench) -> dict:
    python = make_environment(case.environment)
    serving = ServeBench(MODEL, case.tokens, seconds=case.seconds, connections=case.clients, dtype=case.dtype)
    with tempfile.TemporaryDirectory(prefix="hplm-infinity-") as folder:
        model = save_whole(Path(folder) / MODEL)
        before = _measure(python, model, case, serving)
        ours = bench_tenants(serving, case.tenants)["tenants"]
        after = _measure(python, model, case, serving)
    c1_ms = (before[0].percentile_ms(50) + after[0].percentile_ms(50)) / 2
    rate = (before[1].req_per_s + after[1].req_per_s) / 2
    many = f"c{case.clients}"
    return {
        "infinity": {"c1_p50_ms": round(c1_ms, 3), f"{many}_req_per_s": round(rate, 2)},
        "hplm": {count: {"c1_p50_ms": own["p50_ms"], f"{many}_req_per_s": own["req_per_s"]} for count, own in ours.items()},
        "hplm_over_infinity": {
            count: {"c1": round(c1_ms / own["p50_ms"], 2), many: round(own["req_per_s"] / rate, 2)}
            for count, own in ours.items()
        },
        "infinity_drift": round(after[1].req_per_s / before[1].req_per_s, 3),
        "case": asdict(case) | {"environment": str(case.environment)},
        "package": PACKAGE,
    }


def make_environment(folder: Path) -> Path:
    """Returns the Python of infinity-emb's environment, and makes it first if it is missing."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"making {folder} with {PACKAGE}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    if subprocess.run([python, "-c", "import infinity_emb"], capture_output=True).returncode:
        done = subprocess.run([python, "-m", "pip", "install", "-q", PACKAGE], stdout=sys.stderr)
        if done.returncode:
            raise HplmError(f"infinity-emb cannot be installed into {folder}: see pip's messages above")
    return python


def save_whole(folder: Path) -> Path:
    """Saves a MiniLM with random weights as transformers does, with the tokenizer of our random stores."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=MINILM.vocabulary, hidden_size=MINILM.hidden, num_hidden_layers=MINILM.lower_layers + MINILM.upper_layers,
        num_attention_heads=MINILM.heads, intermediate_size=MINILM.intermediate,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": MINILM.positions, **special}
    (folder / "tokenizer.json").write_text(tokenizer_json(MINILM.vocabulary), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(described), "utf-8")
    return folder


def _measure(python: Path, model: Path, case: InfinityBench, serving: ServeBench) -> tuple[Report, Report]:
    """Returns the reports of one client and of all."""
    bodies = (json.dumps({"model": MODEL, "input": [text]}).encode() for text in texts_of(serving))
    requests = [json_request("/embeddings", body) for body in bodies]
    is_bf16 = resolve_precision(case.dtype, resolve_device("auto")).name == "bf16"
    with _serving(python, model, "bfloat16" if is_bf16 else "float32") as url:
        return load_server(url, requests, requests, serving)


@contextmanager
def _serving(python: Path, model: Path, dtype: str) -> Generator[str]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        url = "127.0.0.1:{1}".format(*found.getsockname())
    command = [
        python, "-m", "infinity_emb.cli", "v2", "--model-id", model, "--served-model-name", MODEL, "--engine", "torch",
        "--device", "cpu", "--dtype", dtype, "--no-bettertransformer", "--no-model-warmup", "--log-level", "warning",
        "--host", "127.0.0.1", "--port", url.rpartition(":")[2],
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"}
    server = subprocess.Popen(command, env=os.environ | offline, stdout=sys.stderr)
    try:
        _wait_for(f"http://{url}/health", server)
        yield url
    finally:
        server.terminate()
        server.wait(30)


def _wait_for(url: str, server: subprocess.Popen) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if server.poll() is not None:
            raise HplmError(f"infinity-emb ended with code {server.returncode} while it started: see its messages above")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise HplmError(f"infinity-emb did not start within {START_S:.0f} s")
