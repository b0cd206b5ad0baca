"""The commands of `hplm` that deploy/ and docs/cluster.md show, as lists of words."""

from __future__ import annotations

import re
import shlex
from itertools import takewhile

import yaml

from tests.deploy.image import DEPLOY, compose_service
from tests.deploy.manifests import BUCKET, DOCUMENTED, Object, rendered, words, workloads

PAGES = {"cluster": DOCUMENTED, "deploy": (DEPLOY / "README.md").read_text("utf-8")}
_BLOCK = re.compile(r"^ *```sh\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_ANY_BLOCK = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`hplm ([^`]+)`")


def commands_of_pages(*pages: str) -> list[list[str]]:
    """Returns the whole commands of the blocks, also those that a container runs."""
    blocks = [block for page in pages or PAGES for block in _BLOCK.findall(PAGES[page])]
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [command for line in lines if (command := _command(line))]


def _command(line: list[str]) -> list[str]:
    """Returns what follows the program `hplm`, which begins the line or follows the name of the image."""
    for place, word in enumerate(line):
        if word == "hplm" and (place == 0 or line[place - 1] in ("hplm", "--")) and line[place + 1 : place + 2] != ["hplm"]:
            return line[place + 1 :]
    return []


def mentioned() -> list[tuple[list[str], list[str]]]:
    """Returns the commands that sentences name: the words of the command, and the options named with it."""
    texts = [" ".join(span.split()) for page in PAGES.values() for span in _SPAN.findall(_ANY_BLOCK.sub("", page))]
    return [
        (list(takewhile(re.compile(r"[a-z]+").fullmatch, text.split())), re.findall(r"--[a-z-]+", text))
        for text in dict.fromkeys(texts)
    ]


def commands_of_containers() -> list[list[str]]:
    """Returns the commands of the chart's, KServe's and compose's containers, of their probes and of their handlers."""
    runtime = yaml.safe_load((DEPLOY / "kserve/runtime.yaml").read_text("utf-8"))
    containers = [own for one in workloads(rendered(BUCKET)) for own in one.containers] + runtime["spec"]["containers"]
    services = [compose_service(name) for name in ("triton", "watch", "openai")]
    given = [line for own in containers for line in _lines(own)] + [service["command"] for service in services]
    given += [service["healthcheck"]["test"][1:] for service in services if "healthcheck" in service]
    return [line[1:] for line in given if line[:1] == ["hplm"]]


def _lines(own: Object) -> list[list[str]]:
    handlers = [own[probe] for probe in ("startupProbe", "readinessProbe", "livenessProbe") if probe in own]
    handlers += own.get("lifecycle", {}).values()
    return [words(own), *(handler["exec"]["command"] for handler in handlers if "exec" in handler)]
