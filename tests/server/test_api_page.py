"""The examples of docs/api.md, as a reader sends them to a server and the gateway."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.needed import needs_program
from tests.support.wait import PATIENCE

PAGE = (Path(__file__).parents[2] / "docs/api.md").read_text("utf-8")
BEGIN, *SECTIONS = PAGE.partition("\n## Examples\n")[2].partition("\n## ")[0].split("\n### ")
EXAMPLES = {section.partition("\n")[0]: section for section in SECTIONS}
TENANTS = {
    "stdlib-area": "hugo", "learning-names": "word", "handbook": "find", "finder": "near", "ranker": "mark", "luna": "lora",
}  # fmt: skip
AGREE = {  # what `ask` returns, and `it`: the value of the last line
    "Classify": "max(it, key=it.get) == labels[0][0].decode()",
    "Tag words": "all(one.start in spans[0][:, 0] for one in it)",
    "Find a span": "it.answer == labels[0][0].decode()",
    "Embed": "abs(vectors[0] - it).max() < 1e-5 and tokens",
    "Rerank": "it == numbers.astype(float).argmax()",
    "Generate": "isinstance(it, str) and isinstance(text, str)",
}


def pieces(section, server):
    """Returns the commands and the Python of a section, for this server's models and ports."""
    own = {"localhost:8000": server.http_url, "localhost:8001": server.grpc_url, "localhost:9000": server.gateway, **TENANTS}
    for name, here in {**own, "minilm": "tasks", "200_000": "60_000_000", "200000": "60000000"}.items():
        section = section.replace(name, here)
    return [
        re.findall(rf"^```{kind}\n({begin}.*?)^```", section, re.M | re.S) for kind, begin in (("", "curl"), ("python", ""))
    ]


def answered(command):
    return json.loads(subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=PATIENCE).stdout)


@pytest.mark.slow
@needs_program("curl")
@pytest.mark.parametrize(
    "what",
    [pytest.param(what, marks=pytest.mark.server("chat" if what == "Generate" else "toy")) for what in AGREE],
)
def test_the_examples_are_answered(server, what):
    (command,), programs = pieces(EXAMPLES[what], server)
    answer = answered(command)
    assert any(name in answer for name in ("outputs", "LABEL", "EMBEDDING", "text_output")), answer
    names = {}
    exec("\n".join((*pieces(BEGIN, server)[1], *programs)), names)
    names["it"] = eval(programs[-1].strip().rpartition("\n")[2], names)
    assert eval(AGREE[what], names), names["it"]


@pytest.mark.slow
@pytest.mark.server("toy")
@needs_program("curl")
def test_the_tenants_are_listed(server):
    (command,), _ = pieces(PAGE.partition("\n### Which tenants are here\n")[2].partition("\n#")[0], server)
    assert {"tenant": "hugo", "task": "classify"} in json.loads(answered(command)["LABEL"])


def test_each_section_is_an_example():
    assert EXAMPLES.keys() == AGREE.keys()
