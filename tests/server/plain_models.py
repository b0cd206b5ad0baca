"""Repositories of tiny Python models. `hplm/server` does not depend on hPLMs, so its tests need none."""

from __future__ import annotations

from pathlib import Path

CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 0
input [ {{ name: "TEXT", data_type: TYPE_STRING, dims: [ 1 ] }} ]
output [ {{ name: "SAID", data_type: TYPE_STRING, dims: [ 1 ] }} ]
"""

# Answers with the request's parameters and the state folder.
ECHO = """
import json, os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        said = [{"parameters": json.loads(r.parameters() or "{}"), "state": os.environ.get("HPLM_STATE")} for r in requests]
        tensors = [pb_utils.Tensor("SAID", np.array([json.dumps(one).encode()], dtype=object)) for one in said]
        return [pb_utils.InferenceResponse([tensor]) for tensor in tensors]
"""

# Answers from a thread of its own, like a model with its own queue, once its repository has a file `answer`. Writes a file for
# each request.
SLOW = """
import pathlib, threading, time, uuid
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.folder = pathlib.Path(args["model_repository"])

    def execute(self, requests):
        for request in requests:
            (self.folder / f"asked-{uuid.uuid4()}").touch()
            threading.Thread(target=self.answer, args=(request.get_response_sender(),)).start()

    def answer(self, sender):
        while not (self.folder.parent / "answer").exists():
            time.sleep(0.02)
        tensor = pb_utils.Tensor("SAID", np.array([b"late"], dtype=object))
        sender.send(pb_utils.InferenceResponse([tensor]), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

REFUSES = """
class TritonPythonModel:
    def initialize(self, args):
        raise ValueError("table bio/1 is truncated: export it again")

    def execute(self, requests):
        return []
"""


# Another server, which answers everything, takes a port when the model is loaded, before the server listens: first that of
# HTTP, then that of metrics.
PORTS_TAKEN = """
import os, pathlib, threading
from http.server import BaseHTTPRequestHandler, HTTPServer

class Other(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

for flag in ("--http-port", "--metrics-port"):
    taken = pathlib.Path(__file__).with_name(f"taken{flag}")
    if not taken.exists():
        taken.touch()
        flags = pathlib.Path(f"/proc/{os.getppid()}/cmdline").read_text().split(chr(0))
        (port,) = [one.partition("=")[2] for one in flags if one.startswith(f"{flag}=")]
        other = HTTPServer(("127.0.0.1", int(port)), Other)
        threading.Thread(target=other.serve_forever, daemon=True).start()
        break
"""


def add_model(repository: Path, name: str, code: str) -> None:
    """Adds a model whose code is in its own folder."""
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(CONFIG.format(name=name))
    (repository / name / "1" / "model.py").write_text(code)
