"""Errors of the command line, commands and schemes of other packages, and those that look at this machine: drain and doctor."""

import json
import os
import subprocess
import sys
from functools import reduce
from operator import getitem
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from hplm.cli.main import application, main, parsed
from hplm.errors import HplmError
from hplm.registry.folder import Folder
from hplm.registry.pointer import begin
from hplm.server import held as held_files
from hplm.server import inherited
from hplm.server.held import Held, HeldBy
from hplm.server.inherited import Drain
from tests.cli.commands import leaves, process_without
from tests.support.message import mentions, refusing
from tests.support.packages import installed_package
from tests.support.servers import server_environment
from tests.support.wait import PATIENCE

ECHO = """
import torch

ERRORS = {
    "disk": OSError(28, "No space left on device"),
    "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\\nGPU 0 ..."),
    "code": TypeError("a fault of the code"),
}

def echo(*, json: bool = False, fails: str | None = None):
    if fails:
        raise ERRORS[fails]
    return {"said": "again"}

def register(app):
    app.command(echo)
"""
POINTS = """[hplm.commands]
echo = echo_command:register
serve = echo_command:register
gone = nowhere.at_all:register
bare = echo_command:nothing
[hplm.rivals]
lost = nowhere.at_all:score
"""


@pytest.fixture
def installed(tmp_path):
    with installed_package(tmp_path, POINTS, echo_command=ECHO):
        yield


def test_a_command_of_another_package_works_like_ours(installed, capsys):
    assert main(["echo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"said": "again"}
    assert parsed(["serve"])[0].__module__ == "hplm.cli.serve"  # ours cannot be replaced


@pytest.mark.parametrize(("fails", "named"), [("disk", ["No space left on device"]), ("memory", ["2 GiB", "--device cpu"])])
def test_an_error_of_the_system_is_one_line(installed, capsys, fails, named):
    assert main(["echo", "--fails", fails]) == 1
    said = capsys.readouterr().err
    assert said.startswith("hplm echo: ") and said.count("\n") == 1 and mentions(said, *named)


def test_an_error_of_the_code_is_a_traceback(installed):
    with pytest.raises(TypeError):
        main(["echo", "--fails", "code"])


def test_a_command_that_cannot_be_loaded_is_listed_and_says_why(installed, capsys):
    assert main(["--help"]) == 0 and "gone" in capsys.readouterr().out
    for words in ([], ["--help"], ["x", "--json", "-1"]):
        assert main(["gone", *words]) == 1
        said = capsys.readouterr().err
        assert "`hplm gone`" in said and "`nowhere`" in said and "pip install -e '.[nowhere]'" in said, words
        assert main(["bare", *words]) == 1
        assert "'echo_command:nothing'" in capsys.readouterr().err, words


def test_without_its_package_a_scheme_says_how_to_install_it(installed, toy, capsys):
    assert main(f"evaluate --against lost --id acme --test x --store {toy.store.folder}".split()) == 1
    assert mentions(capsys.readouterr().err, "not installed", "'lost'", "`nowhere`", "pip install")


@pytest.mark.parametrize("words", [words for words in leaves() if words != ("bench",)], ids=" ".join)
def test_each_option_has_a_help_and_a_wrong_one_is_refused_in_one_line(words, capsys):
    options = reduce(getitem, words, application()).assemble_argument_collection(parse_docstring=True)
    assert not [one.name for one in options if one.parse and not one.children and not one.parameter.help]
    assert main([*words, "--no-such-option"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"hplm {' '.join(words)}: ") and said.count("\n") == 1 and mentions(said, "--help")


@pytest.mark.parametrize(
    "words, named",
    [
        ("tenat list", "tenant"), ("tenant shw x", "show"), ("export --stor s", "--store"),
        ("domain inspect --store s --name n --version many", "--version"), ("tenant show x y", "'y'"),
        ("place profile --repository r --to t --devices cpu:0 cpu:1", "'cpu:1'"),
        ("watch --timeout 0", "--timeout"), ("watch --timeout nan", "--timeout"),
        ("serve --start-timeout -1", "--start-timeout"),
        *(
            (f"place search --cluster c --profiles p --trace t --to x {option} {wrong}", option)
            for option, wrong in (("--rate", 0), ("--batch-texts", 0))
        ),
        ("begin --repository r --state s --lease inf", "--lease"), ("drain --seconds nan", "--seconds"),
        ("drain --notice -1", "--notice"), ("tenant limit x --in-flight 2.5", "'2.5'"),
        ("tenant limit x --homes inf", "--homes"), ("build tenant --id a --store s --epochs 2.5", "--epochs: '2.5'"),
        ("infer a --tenant b --top-k 1.5", "--top-k: '1.5'"), ("tenant students a --store s --layers 1.5", "--layers: '1.5'"),
    ],
)  # fmt: skip
def test_a_typing_error_is_named_with_the_right_word(words, named, capsys):
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert named in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "words, expected",
    [
        ("infer --tenant a --pair -x -- -5x", {"text": "-5x", "pair": "-x"}),
        ("infer -5 --tenant=a --tenant b", {"text": "-5", "tenant": "b"}),
        ("tenant key add x --days -1", {"id": "x", "days": -1.0}),
        ("tenant limit x --in-flight 1e3", {"in_flight": 1000}),
        ("watch --models a b --models c", {"models": ("a", "b", "c")}),
        ("tenant exits x --store s --texts t --drop 1 2 --drop 3", {"drop": (1.0, 2.0, 3.0)}),
        ("domain update --name n --store s --corpus a b --corpus c", {"corpus": (Path("a"), Path("b"), Path("c"))}),
        ("serve --address 0.0.0.0 -- --trace-config=rate=1 -v", {"flags": ("--trace-config=rate=1", "-v")}),
        ("export --store s --parameters a=1 b=2 --replace", {"parameters": ("a=1", "b=2"), "replace_": True}),
        ("build tenant --id a --store s --task tag --task classify", {"task": "classify"}),
        ("place profile --repository r --devices cpu:9 --devices cpu:0,cpu:1 --to t --intra 1,2",
         {"devices": ("cpu:0", "cpu:1"), "intra": (1, 2)}),
    ],
)  # fmt: skip
def test_words_reach_their_options(words, expected):
    assert parsed(words.split())[1].arguments.items() >= expected.items()


@pytest.mark.parametrize(
    ("words", "given", "policy"),
    [("build root", None, "PASSIVE"), ("import", None, "PASSIVE"), ("export", "ACTIVE", "ACTIVE"), ("serve", None, None)],
)
def test_threads_of_commands_that_compute_sleep_when_they_wait(words, given, policy, monkeypatch, capsys):
    """An engine's do not, and a user's choice counts."""
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    assert main([*words.split(), "--help"]) == 0
    assert os.environ.get("OMP_WAIT_POLICY") == policy


def test_help_needs_no_heavy_import():
    """`hplm --help` answers at once, because commands import heavy packages only when they run."""
    code = """import sys; from hplm.cli.main import main; main(["--help"]), main(["build", "tenant", "--help"])
assert "bench" in sys.modules and "hplm.cli.serve" in sys.modules
assert not sys.modules.keys() & {"torch", "numpy", "transformers", "builder.store", "research", "hplm_client"}"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


def test_without_the_builder_help_lists_its_commands():
    with process_without("builder") as run:
        code, out, _ = run(["--help"])
        assert code == 0 and mentions(out, "calibrate", "not installed here", "serve")
        assert run(["tenant", "--help"])[0] == 0


def test_changes_of_keys_and_limits_need_no_torch(toy, tmp_path):
    """It takes a second of processor time, for each command."""
    served = f"--repository {toy.repository} --state {tmp_path}"
    begin(Folder(tmp_path / "toy"))
    words = ["tenant list", "tenant show acme", "tenant key add acme", "tenant limit acme --rate 5", "tenant log"]
    code = f"""import sys; from hplm.cli.main import main
for words in {words}: assert main(f"{{words}} {served}".split()) == 0, words
heavy = sys.modules.keys() & {{"torch", "tokenizers", "transformers", "builder.cli"}}; assert not heavy, heavy"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


AT_ONCE = ("--notice", "0")


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A server that is not there. No other one of this machine is seen."""
    for module in (held_files, inherited):
        monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path)
    with server_environment(monkeypatch) as name:
        yield name


@pytest.mark.parametrize("is_named", [True, False])
def test_models_refuse_and_what_they_hold_is_awaited_but_not_what_a_dead_one_held(
    server, is_named, monkeypatch, tmp_path, capsys
):
    if not is_named:  # as `docker run` and compose start one
        monkeypatch.delenv("HPLM_SERVER_ID")
    held = Held("toy-upper")
    assert not Drain().begun
    held.take()
    assert main(["drain", "--seconds", "0.3", *AT_ONCE]) == 0
    assert mentions(capsys.readouterr().out, "1", "left") and Drain().begun

    def dies():
        held.take()
        (shown,) = tmp_path.glob("*-held-*@toy-upper")
        shown.rename(shown.with_name(f"{inherited.server()}-held-{2**22 + 1}@toy-upper"))  # above the largest pid
        held.close()
        Held("toy-lookup")

    for ends in (held.answered, dies):
        ends()
        assert main(["drain", *AT_ONCE]) == 0
        assert mentions(capsys.readouterr().out, "all", "answered")


def test_a_server_that_starts_again_with_the_same_id_takes_requests(server, tmp_path, capsys):
    Held("toy-upper").take()
    assert main(["drain", "--seconds", "0", *AT_ONCE]) == 0 and Drain().begun
    for shown in tmp_path.glob(f"{inherited.server()}*"):  # of the same number in another life of this container
        shown.rename(shown.with_name(shown.name.replace(inherited.server(), f"{server}-{os.getppid()}-1")))
    assert not Drain().begun and HeldBy("toy-upper").count == 0
    assert main(["drain", *AT_ONCE]) == 1
    assert mentions(capsys.readouterr().err, server, "HPLM_SERVER_ID")


def test_of_several_servers_one_must_be_named_and_without_any_it_says_so(server, monkeypatch, tmp_path, capsys):
    assert main(["drain", *AT_ONCE]) == 1
    assert mentions(capsys.readouterr().err, server, "HPLM_SERVER_ID")
    Held("toy-upper")
    own = inherited.server()
    monkeypatch.delenv("HPLM_SERVER_ID")
    Held("toy-upper")
    assert main(["drain", *AT_ONCE]) == 1
    assert mentions(capsys.readouterr().err, own, inherited.server(), "HPLM_SERVER_ID") and not [*tmp_path.glob("*-draining")]


def test_a_file_of_another_user_drains_nothing_and_counts_nothing(server, monkeypatch, capsys):
    Held("toy-upper").take()
    inherited.start_to_drain(inherited.server())
    monkeypatch.setattr(Path, "lstat", lambda path: SimpleNamespace(st_mode=path.stat().st_mode, st_uid=54321))
    assert not Drain().begun and HeldBy("toy-upper").count == 0
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert main(["drain", *AT_ONCE]) == 1
    assert mentions(capsys.readouterr().err, "root")
    monkeypatch.setattr(Path, "unlink", Mock(side_effect=PermissionError(1, "Operation not permitted")))
    with refusing(HplmError, inherited.server(), "root"):
        inherited.start_to_drain(inherited.server())


def test_the_doctors_exit_code_says_whether_there_is_a_problem(capsys, toy):
    """The machine may have problems of its own. The memory of servers that run beside: tests/doctor/test_checks.py."""
    for address in ("127.0.0.1", "0.0.0.0"):
        words = ["doctor", "--json", "--repository", str(toy.repository), "--address", address]
        code, said = main(words), capsys.readouterr()
        checks = {check["check"]: check["status"] for check in json.loads(said.out)["checks"]}
        problems = [name for name, status in checks.items() if status == "problem"]
        assert code == bool(problems) and ("tenants" in problems) == (address == "0.0.0.0")
        assert mentions(said.err, *problems) and set(checks.values()) <= {"ok", "warning", "unknown", "problem"}
