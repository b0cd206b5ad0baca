"""`hplm bench infinity`: served answers beside infinity-emb, an embedding server, in an environment of its own.

infinity-emb is measured before and after our servers; `infinity_drift` shows whether the machine has changed its speed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from bench.rows import EngineDtype, Row, Rows, Seconds, Tokens, Whole, benchmark, expect_text, say
from bench.serve import one_and_many, tenants_served
from bench.server import texts_of
from hplm.engine.engine import resolve_device, resolve_precision
from hplm.errors import HplmError
from hplm.server.ports import LOOPBACK, free_ports
from hplm.server.process import Process
from loadtest.encode import http_request
from loadtest.load import Report
from testing.random_store import MINILM, bert_config, tokenizer_json

PACKAGE = "infinity-emb[torch,server]==0.0.78"
ENVIRONMENT = Path("infinity-venv")  # infinity-emb's Python environment, which is made if it is missing
START_S = 180.0
MODEL = "minilm"
CLIENTS = 32
TARGETS = {"fp32": 3.0, "bf16": 3.0, "int8": 6.0}  # times infinity's throughput, by the precision of our engine
VECTORS_TARGET = 2.5


@benchmark(tokens=16, seconds=0.5, tenants=(1, 4))
def infinity(
    *,
    tokens: Tokens = 128,
    seconds: Seconds = 10.0,
    dtype: EngineDtype = "auto",
    tenants: tuple[Whole, ...] = (1, 10_000),
    vectors: bool = False,
) -> Rows:
    """Serves a MiniLM with random weights by infinity-emb (torch), and by hPLM for 1 and for 10,000 tenants.

    Measures one client and 32 with the same texts. infinity-emb answers with an embedding, hPLM with a label. Both have the
    GPU if there is one.

    :param dtype: of our engine; infinity-emb computes in bf16 where it does, else in fp32
    :param tenants: of our servers
    :param vectors: hPLM answers with vectors too, the means of all tokens' states
    """
    expect_text(tokens, MODEL)
    python, device = make_environment(ENVIRONMENT), resolve_device("auto")
    precision = resolve_precision(dtype, device).name
    bodies = [json.dumps({"model": MODEL, "input": [text]}) for text in texts_of(MINILM, [tokens] * 4 * CLIENTS)]
    requests = [http_request("/embeddings", body.encode(), {"Content-Type": "application/json"}) for body in bodies]
    with tempfile.TemporaryDirectory(prefix="hplm-infinity-") as folder:
        model = save_whole(Path(folder) / MODEL)

        def theirs() -> tuple[Report, Report]:
            with _serving(python, model, device, "bfloat16" if precision == "bf16" else "float32") as url:
                return one_and_many(url, requests, requests, seconds, CLIENTS)

        before = theirs()
        rows = tenants_served("minilm", tokens, sorted(tenants), seconds, CLIENTS, dtype, vectors)
        ours = {row.name: row.value for row in rows if isinstance(row.value, float)}
        after = theirs()
    c1_ms = (before[0].percentile_ms(50) + after[0].percentile_ms(50)) / 2
    least = VECTORS_TARGET if vectors else TARGETS.get(precision)
    rate, many = (before[1].req_per_s + after[1].req_per_s) / 2, f"c{CLIENTS}"
    yield Row("infinity/c1_p50_ms", c1_ms, "ms")
    yield Row(f"infinity/{many}_req_per_s", rate, "/s")
    for count in tenants:
        p50_ms, our_rate = ours[f"tenants/{count}/p50_ms"], ours[f"tenants/{count}/req_per_s"]
        yield Row(f"hplm/{count}/c1_p50_ms", p50_ms, "ms")
        yield Row(f"hplm/{count}/{many}_req_per_s", our_rate, "/s")
        yield Row(f"hplm_over_infinity/{count}/c1", c1_ms / p50_ms)
        yield Row(f"hplm_over_infinity/{count}/{many}", our_rate / rate, least=least)
    yield Row("infinity_drift", after[1].req_per_s / before[1].req_per_s)
    yield Row("dtype", precision)
    yield Row("package", PACKAGE)


def make_environment(folder: Path) -> Path:
    """Returns the Python of infinity-emb's environment, and makes it first if it is missing."""
    python = folder / "bin" / "python"
    if python.exists() and not subprocess.run([python, "-c", "import infinity_emb"], capture_output=True).returncode:
        return python
    say(f"making {folder} with {PACKAGE}")
    for command in ([sys.executable, "-m", "venv", folder], [python, "-m", "pip", "install", "-q", PACKAGE]):
        if subprocess.run(command, stdout=sys.stderr).returncode:
            raise HplmError(f"infinity-emb cannot be installed into {folder}: see the messages above")
    return python


def save_whole(folder: Path) -> Path:
    """Saves a MiniLM with random weights as transformers does, with the tokenizer of our random stores."""
    from transformers import BertModel  # takes seconds, also where only the command's options are read

    torch.manual_seed(0)
    BertModel(bert_config(MINILM)).save_pretrained(folder)
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": MINILM.positions, **special}
    (folder / "tokenizer.json").write_text(tokenizer_json(MINILM.vocabulary), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(described), "utf-8")
    return folder


@contextmanager
def _serving(python: Path, model: Path, device: torch.device, dtype: str) -> Generator[str]:
    (port,) = free_ports(1)
    command = [
        *("env", "HF_HUB_OFFLINE=1", "DO_NOT_TRACK=1", "INFINITY_ANONYMOUS_USAGE_STATS=0"),
        *(str(python), "-m", "infinity_emb.cli", "v2", "--model-id", str(model), "--served-model-name", MODEL),
        *("--engine", "torch", "--device", device.type, "--dtype", dtype, "--no-bettertransformer", "--no-model-warmup"),
        *("--log-level", "warning", "--host", LOOPBACK, "--port", str(port)),
    ]
    server = Process("infinity-emb", command, model.with_name("infinity.log"))
    server.start()
    try:
        server.wait_until(lambda: _answers(f"http://{LOOPBACK}:{port}/health"), START_S)
        yield f"{LOOPBACK}:{port}"
    finally:
        server.stop(30)


def _answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=5):
        return True
    return False
