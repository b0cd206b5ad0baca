"""The examples, run as a reader runs them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from triton_fakes import Refusal

from tests.support.needed import needs_program
from tests.support.wait import PATIENCE
from tests.support.ways import Way

EXAMPLES = Path(__file__).parents[1] / "examples"
TEXT = 'say "naïve" \\\\n 文字\n\ttwo lines, and \x01\n'


@pytest.mark.parametrize(
    ("script", "protocol", "words"),
    [
        ("hplm_client_async.py", "http", "{url} acme"),
        *(("tritonclient_plain.py", protocol, f"{protocol} {{url}} minilm acme") for protocol in ("http", "grpc")),
        pytest.param("curl.sh", "http", "{url} minilm acme", marks=needs_program("curl")),
    ],
)
def test_an_example_prints_the_answer(fake, monkeypatch, script, protocol, words):
    monkeypatch.setenv("HPLM_API_KEY", "K3Y")
    program = "sh" if script == "curl.sh" else sys.executable
    command = [program, str(EXAMPLES / script), *words.format(url=Way(protocol).url(fake)).split(), TEXT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert TEXT in (json.loads(done.stdout)["outputs"][0]["data"] if script == "curl.sh" else done.stdout)
    assert fake.requests[0].headers["authorization"] == "Bearer K3Y" and fake.requests[0].parameters["tenant"] == "acme"
    if script != "tritonclient_plain.py":  # which does not say by itself what was refused
        fake.script = [Refusal("[no_tenant] no such tenant", 404)] * 2
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        assert "[no_tenant]" in done.stdout + done.stderr and (done.returncode != 0) == (script == "curl.sh")


@needs_program("curl")
def test_the_command_of_the_page_is_answered(fake):
    commands = re.findall(r"```\n(curl .*?)```", (EXAMPLES.parents[1] / "docs/api.md").read_text(), re.DOTALL)
    (command,) = [one for one in commands if "/infer" in one and "Open a socket." in one]
    command = command.replace("localhost:8000", fake.http_url)
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=PATIENCE)
    outputs = {output["name"]: output["data"] for output in json.loads(done.stdout)["outputs"]}
    assert outputs == {"LABEL": ["Open a socket.", "Split the string into words."], "SCORE": [1.0, 1.0]}
