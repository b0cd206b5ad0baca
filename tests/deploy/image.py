"""The container image without a container engine: its files in a folder, and its documented commands as lists."""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import yaml

from hplm.server.discovery import find_installation

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SECRET = "the-administrators-secret"


@dataclass(frozen=True)
class Copy:
    sources: list[str]
    target: str


def dockerfile_copies() -> list[Copy]:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    words = [line.split()[1:] for line in lines if line.startswith("COPY ")]
    return [Copy(sources, target) for *sources, target in words]


def lay_out(folder: Path) -> Path:
    """Makes `/opt` of the image: the Python backend's files of NVIDIA's image, then those of the Dockerfile's COPY lines."""
    (folder / "empty").mkdir()
    opt = folder / "opt"
    triton = opt / "tritonserver"
    triton.mkdir(parents=True)
    find_installation().lay_out(triton, folder / "empty")
    for copy in dockerfile_copies():
        target = opt / Path(copy.target).relative_to("/opt")
        for source in copy.sources:
            # Like COPY: a folder's content goes into the target, and a file goes into a target that ends with a slash.
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                target.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, target)
    return opt


def docker_run(program: str = "tritonserver") -> tuple[list[str], list[str]]:
    """Returns the words of the documented line before this word, and from it on."""
    lines = re.findall(r"^docker run (?:.*\\\n)*.*$", (DEPLOY / "README.md").read_text(), re.MULTILINE)
    commands = [shlex.split(line.replace("\\\n", " ").replace("$HPLM_ADMIN", SECRET)) for line in lines]
    (words,) = [words for words in commands if program in words]
    start = words.index(program)
    return words[:start], words[start:]


def dockerfile_variables() -> dict[str, str]:
    """Returns what the image's environment has of ours."""
    return dict(re.findall(r"^ENV (HPLM_\w+)=(\w+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE))


def compose_service(name: str = "triton") -> dict:
    text = (DEPLOY / "compose.yaml").read_text()
    text = re.sub(r"\$\{HPLM_ADMIN:\?[^}]*\}", SECRET, text).replace("$$", "$")
    return yaml.safe_load(text)["services"][name]
