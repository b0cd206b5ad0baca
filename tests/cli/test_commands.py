"""Errors of the command line, and commands and schemes of other packages: these are found by entry points."""

import json
import subprocess
import sys

import pytest

from hplm.cli.main import main, parser
from tests.support.message import mentions

ECHO = """
import torch

ERRORS = {
    "disk": OSError(28, "No space left on device"),
    "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\\nGPU 0 ..."),
    "code": TypeError("a fault of the code"),
}

def run(args):
    if args.fails:
        raise ERRORS[args.fails]
    return {"said": "again"}

def register(commands):
    echo = commands.add_parser("echo", help="says it again")
    echo.add_argument("--json", action="store_true")
    echo.add_argument("--fails")
    echo.set_defaults(run=run)
"""
POINTS = """[hplm.commands]
echo = echo_command:register
serve = echo_command:register
gone = nowhere.at_all:register
bare = echo_command:nothing
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """An installed package: a module and its metadata."""
    (tmp_path / "echo_command.py").write_text(ECHO)
    info = tmp_path / "echo_command-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: echo-command\nVersion: 1.0\nProvides-Extra: nowhere\n")
    (info / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("echo_command", None)


def test_a_command_of_another_package_works_like_ours(installed, capsys):
    assert main(["echo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"said": "again"}
    assert parser().parse_args(["serve"]).run.__module__ == "hplm.cli.serve"  # ours cannot be replaced


def test_options_of_earlier_exports_are_still_taken():
    given = ["export", "--store", "s", "--repository", "r", "--cache", "slotted", "--seats", "4"]
    assert parser().parse_args(given).max_sequences == 4


@pytest.mark.parametrize(("fails", "named"), [("disk", ["No space left on device"]), ("memory", ["2 GiB", "--device cpu"])])
def test_an_error_of_the_system_is_one_line(installed, capsys, fails, named):
    assert main(["echo", "--fails", fails]) == 1
    said = capsys.readouterr().err
    assert said.startswith("hplm echo: ") and said.count("\n") == 1 and mentions(said, *named)


def test_an_error_of_the_code_is_a_traceback(installed):
    with pytest.raises(TypeError):
        main(["echo", "--fails", "code"])


def test_a_command_that_cannot_be_loaded_is_listed_and_says_why(installed, capsys):
    assert "gone" in parser().format_help()
    for words in ([], ["--help"], ["x", "--json", "-1"]):
        assert main(["gone", *words]) == 1
        said = capsys.readouterr().err
        assert "`hplm gone`" in said and "`nowhere`" in said and "pip install -e '.[nowhere]'" in said, words
        assert main(["bare", *words]) == 1
        assert "'echo_command:nothing'" in capsys.readouterr().err, words


@pytest.mark.parametrize(
    "package, command, named",
    [
        ("bench", "bench", ["`bench`", "pip install -e '.[bench]'"]),
        ("bench", "bench serve --size minilm --json", ["`bench`", "pip install -e '.[bench]'"]),
        ("bench", "bench --help", ["`bench`", "pip install -e '.[bench]'"]),
        ("research", "evaluate --against plot --id acme --test x --store STORE", ["'plot'", "`research`", "pip install"]),
    ],
)
def test_without_its_package_a_command_or_scheme_says_how_to_install_it(toy, monkeypatch, capsys, package, command, named):
    """As in the container image, which has the metadata of all packages, but only the packages hplm and backends."""
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises ModuleNotFoundError
    assert main(command.replace("STORE", str(toy.store.folder)).split()) == 1
    assert mentions(capsys.readouterr().err, "not installed", *named)


def test_help_needs_no_heavy_import():
    """`hplm --help` answers at once, because commands import heavy packages only when they run."""
    code = """import sys; from hplm.cli.main import parser; parser()
assert "bench" in sys.modules
assert not sys.modules.keys() & {"torch", "numpy", "transformers", "builder", "research", "hplm_client"}"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
