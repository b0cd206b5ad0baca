"""Commands of other packages, by entry points: found, and named where they are registered but not installed."""

import json
import subprocess
import sys

import pytest

from hplm.cli.main import main, parser

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
    """A package as pip leaves it: a module, and its metadata."""
    (tmp_path / "echo_command.py").write_text(ECHO)
    info = tmp_path / "echo_command-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: echo-command\nVersion: 1.0\nProvides-Extra: nowhere\n")
    (info / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("echo_command", None)


def test_another_packages_command_is_a_command_like_ours(installed, capsys):
    assert main(["echo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"said": "again"}
    assert parser().parse_args(["serve"]).run.__module__ == "hplm.cli.serve"  # ours cannot be replaced


@pytest.mark.parametrize("words", [[], ["--help"], ["x", "--json", "-1"]])
def test_what_cannot_be_loaded_is_listed_and_says_why(installed, capsys, words):
    assert "gone" in parser().format_help()
    assert main(["gone", *words]) == 1
    said = capsys.readouterr().err
    assert "`hplm gone`" in said and "`nowhere`" in said and "pip install -e '.[nowhere]'" in said
    assert main(["bare", *words]) == 1
    assert "'echo_command:nothing'" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["", "serve --size minilm --json", "--help"])
def test_without_bench_its_command_says_how_to_get_it(monkeypatch, capsys, words):
    """As in the container image, which holds the metadata of all packages and of these only hplm and backends."""
    monkeypatch.setitem(sys.modules, "bench", None)
    assert main(["bench", *words.split()]) == 1
    said = capsys.readouterr().err
    assert "`bench`" in said and "not installed" in said and "pip install -e '.[bench]'" in said


def test_help_needs_no_heavy_import():
    """`hplm --help` answers at once: commands import what computes when they run."""
    code = """import sys; from hplm.cli.main import parser; parser()
assert "bench.serve" in sys.modules
assert not sys.modules.keys() & {"torch", "numpy", "transformers", "builder", "research", "hplm_client"}"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
