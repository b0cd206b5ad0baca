"""Commands and schemes of other packages are found by entry points. If one is not installed, the error names its package."""

import json
import subprocess
import sys

import pytest

from hplm.cli.main import main, parser
from hplm.registered import RIVALS, SCHEMES, registered
from research.schemes import export as schemes
from research.schemes import trained

ECHO = """
def register(commands):
    echo = commands.add_parser("echo", help="says it again")
    echo.add_argument("--json", action="store_true")
    echo.set_defaults(run=lambda args: {"said": "again"})
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


@pytest.mark.parametrize("words", [[], ["--help"], ["x", "--json", "-1"]])
def test_a_command_that_cannot_be_loaded_is_listed_and_says_why(installed, capsys, words):
    assert "gone" in parser().format_help()
    assert main(["gone", *words]) == 1
    said = capsys.readouterr().err
    assert "`hplm gone`" in said and "`nowhere`" in said and "pip install -e '.[nowhere]'" in said
    assert main(["bare", *words]) == 1
    assert "'echo_command:nothing'" in capsys.readouterr().err


def without(monkeypatch, package):
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises ModuleNotFoundError


@pytest.mark.parametrize("words", ["", "serve --size minilm --json", "--help"])
def test_without_bench_its_command_says_how_to_install_it(monkeypatch, capsys, words):
    """As in the container image, which has the metadata of all packages, but only the packages hplm and backends."""
    without(monkeypatch, "bench")
    assert main(["bench", *words.split()]) == 1
    said = capsys.readouterr().err
    assert "`bench`" in said and "not installed" in said and "pip install -e '.[bench]'" in said


def test_all_schemes_and_rivals_of_research_are_registered():
    assert registered(SCHEMES).keys() == set(schemes.SCHEMES) - {"hplm"}
    assert registered(RIVALS).keys() == trained.SCHEMES.keys()


@pytest.mark.parametrize("command", ["export --scheme plot --repository", "evaluate --against plot --id acme --test"])
def test_without_research_its_schemes_say_how_to_install_them(toy, tmp_path, monkeypatch, capsys, command):
    without(monkeypatch, "research")
    store = ["--store", str(toy.store.folder)]
    assert main([*command.split(), str(tmp_path / "x"), *store]) == 1
    said = capsys.readouterr().err
    assert "'plot'" in said and "`research`" in said and "not installed" in said and "pip install" in said
    assert main(["export", "--repository", str(tmp_path / "repository"), *store]) == 0  # needs no other package


def test_the_error_of_an_unknown_scheme_names_the_known_ones(toy, tmp_path, capsys):
    given = ["--store", str(toy.store.folder), "--repository", str(tmp_path), "--scheme", "bert"]
    assert main(["export", *given]) == 1
    said = capsys.readouterr().err
    assert "'bert'" in said and "hplm, adapter, compressed" in said


def test_a_repository_has_a_backbone_in_one_scheme_only(toy, tmp_path, capsys):
    export = ["export", "--store", str(toy.store.folder), "--repository", str(tmp_path)]
    assert main([*export, "--scheme", "shared"]) == 0
    assert main(export) == 1
    assert "scheme 'shared'" in capsys.readouterr().err


def test_help_needs_no_heavy_import():
    """`hplm --help` answers at once, because commands import heavy packages only when they run."""
    code = """import sys; from hplm.cli.main import parser; parser()
assert "bench.serve" in sys.modules
assert not sys.modules.keys() & {"torch", "numpy", "transformers", "builder", "research", "hplm_client"}"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
