"""The container image without a container engine: its files in a folder, and the documented commands as lists of words."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sysconfig
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import yaml

from hplm.server.discovery import find_installation
from hplm.server.ports import Ports
from hplm.server.process import Process

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PAGES = {name: (ROOT / f"docs/{name}.md").read_text("utf-8") for name in ("building", "cluster", "kubernetes")}
PAGES["deploy"] = (DEPLOY / "README.md").read_text("utf-8")
_BLOCK = re.compile(r"^ *```sh\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SECRET = "the-administrators-secret"
# Installed here, not in the image: what trains, measures and serves without a container.
NOT_IN_THE_IMAGE = (
    *("transformers", "matplotlib", "scipy", "sklearn", "seqeval", "zstandard", "gguf"),
    *("tritonclient", "pytriton", "locust", "hplm_client", "hplm_openai"),
)
NOT_IN_THE_MANAGERS = ("gguf", "pytriton", "locust")


def dockerfile_copies(dockerfile: str = "Dockerfile") -> list[tuple[str, str]]:
    """Returns the sources of a Dockerfile's COPY lines, each with its target."""
    lines = (DEPLOY / dockerfile).read_text().splitlines()
    words = [line.split()[1:] for line in lines if line.startswith("COPY ")]
    return [(source, target) for *sources, target in words for source in sources]


def lay_out(folder: Path) -> Path:
    """Makes `/opt` of the image: the Python backend's files of NVIDIA's image, then those of the Dockerfile's COPY lines."""
    (folder / "empty").mkdir()
    triton = folder / "opt/tritonserver"
    triton.mkdir(parents=True)
    find_installation().lay_out(triton, folder / "empty")
    return copy_files(folder / "opt")


def copy_files(opt: Path, dockerfile: str = "Dockerfile") -> Path:
    """Copies the files of a Dockerfile's COPY lines into a folder for `/opt`."""
    for source, target in dockerfile_copies(dockerfile):
        # Like COPY: a folder's content goes into the target, and a file goes into a target that ends with a slash.
        to = opt / Path(target).relative_to("/opt")
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, to, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            to.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, to)
    return opt


def python_of_the_image(folder: Path, opt: Path, not_there: Sequence[str] = NOT_IN_THE_IMAGE) -> Path:
    """Returns the bin folder of a Python with the packages that the image installs, and nothing of this checkout.

    The stub ignores PYTHONPATH. A path in a .pth file is searched, but other .pth files there, as of editable installs,
    are not read.
    """
    venv.create(folder, symlinks=True)
    absent = folder / "absent"
    absent.mkdir()
    for package in not_there:
        missing = "raise ModuleNotFoundError(f'{__name__} is not in the image', name=__name__)\n"
        (absent / f"{package}.py").write_text(missing)
    (packages,) = folder.glob("lib/python3*/site-packages")
    installed = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    (packages / "image.pth").write_text("\n".join([str(opt / "hplm"), str(opt / "hplm/clients"), str(absent), *installed, ""]))
    return folder / "bin"


@contextmanager
def started(folder: Path, repository: Path, **variables: str) -> Iterator[SimpleNamespace]:
    """Starts the documented `tritonserver` with the image's files and variables, and yields its addresses when it is ready."""
    opt, installation, ports = lay_out(folder), find_installation(), Ports().claim("127.0.0.1")
    environment = {**installation.environment(opt / "tritonserver", os.environ), **dockerfile_variables(), **variables}
    environment["PATH"] = f"{python_of_the_image(folder / 'python', opt)}:{environment['PATH']}"
    flags = [flag.replace("=/models", f"={repository}") for flag in docker_run()[1][1:]]
    flags += [f"--{service}-address=127.0.0.1" for service in ("http", "grpc", "metrics")]
    flags += [f"--backend-directory={opt}/tritonserver/backends", *(f"{flag}={port}" for flag, port in ports.items())]
    command = ["env", "-i", *(f"{name}={value}" for name, value in environment.items()), str(installation.binary), *flags]
    server = Process("tritonserver", command, folder / "log", folder=str(opt / "tritonserver"))
    server.start()
    try:
        server.wait_until(lambda: _is_ready(f"http://127.0.0.1:{ports.http}/v2/health/ready"), 240)
        yield SimpleNamespace(http_url=f"127.0.0.1:{ports.http}", grpc_url=f"127.0.0.1:{ports.grpc}")
    finally:
        server.stop(10)


def _is_ready(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=5):
        return True
    return False


def commands_of_pages(*pages: str) -> list[list[str]]:
    """Returns the whole commands of the blocks, also those that a container runs, and as the first of Slurm's tasks does."""
    blocks = [block.replace("$SLURM_ARRAY_TASK_ID", "1") for page in pages or PAGES for block in _BLOCK.findall(PAGES[page])]
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [command for line in lines if (command := _command(line))]


def _command(line: list[str]) -> list[str]:
    """Returns what follows the program `hplm`, which begins the line or follows the name of the image."""
    for place, word in enumerate(line):
        if word == "hplm" and (place == 0 or line[place - 1] in ("hplm", "--")) and line[place + 1 : place + 2] != ["hplm"]:
            return line[place + 1 :]
    return []


def docker_run(program: str = "tritonserver") -> tuple[list[str], list[str]]:
    """Returns the words of the documented line before this word, and from it on."""
    lines = re.findall(r"^docker run (?:.*\\\n)*.*$", PAGES["deploy"], re.MULTILINE)
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
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    return yaml.safe_load(text)["services"][name]
