"""The examples, run as a reader runs them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[1] / "examples"
TEXT = 'say "naïve" \\ 文字'


def run(*command: str, server, protocol: str = "http", tenant: str = "acme") -> subprocess.CompletedProcess[str]:
    url = server.http_url if protocol == "http" else server.grpc_url
    arguments = ["--url", url, "--tenant", tenant, "--key", "K3Y", "--timeout", "60", TEXT]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("script", "protocol"),
    [
        *((f"hplm_client_{kind}.py", protocol) for kind in ("sync", "async") for protocol in ("http", "grpc")),
        ("tritonclient_http.py", "http"),
        ("tritonclient_grpc.py", "grpc"),
    ],
)
def test_a_python_example(server, script, protocol):
    choice = ["--protocol", protocol] if script.startswith("hplm_client") else []
    done = run(sys.executable, str(EXAMPLES / script), *choice, server=server, protocol=protocol)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(TEXT) >= 2, "as the text and as the label that the fake backbone gives it"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_examples(server):
    def outputs(done):
        return {output["name"]: output["data"] for output in json.loads(done.stdout)["outputs"]}

    done = run("sh", str(EXAMPLES / "curl.sh"), server=server)
    assert done.returncode == 0, done.stderr
    assert outputs(done) == {"LABEL": [TEXT], "SCORE": [1.0], "SPAN": [0, len(TEXT)], "VERSION": ["v7"]}
    done = run("sh", str(EXAMPLES / "curl.sh"), server=server, tenant="nobody")
    assert done.returncode != 0 and "[no_tenant]" in json.loads(done.stdout)["error"]
    (command,) = re.findall(r"```sh\n(curl .*?)```", (EXAMPLES.parent / "README.md").read_text(), re.DOTALL)
    command = command.replace("curl ", "curl --silent ", 1).replace("127.0.0.1:8000", server.http_url)
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert outputs(done) == {"LABEL": ["some text"], "SCORE": [1.0]}
