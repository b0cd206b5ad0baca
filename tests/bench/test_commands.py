"""Each measuring command ends with its figures as JSON, and refuses impossible options before it builds anything."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import get_args

import pytest

import bench
from bench.claims import at
from bench.rows import EngineDtype, Size
from hplm.cli.main import main
from hplm.options import ENGINE_DTYPES
from hplm.tenants.directory import Directory
from loadtest import isolation, monitoring
from loadtest.chaos import __main__ as chaos
from loadtest.chaos import bucket, faults
from research.comparison import compare
from research.papers import __main__ as papers
from research.papers import tabi
from testing import random_repository
from testing.random_store import SIZES
from tests.builder.checkpoints import save_bert
from tests.deploy.door import require_haproxy
from tests.support.learning import by_one_step
from tests.support.lent import LentCopy, loading, loads_in_threads
from tests.support.message import mentions
from tests.support.wait import PATIENCE

MAINS = {
    "papers": papers.main, "comparison": compare.main, "chaos": chaos.main, "isolation": isolation.main,
    "random": random_repository.main,
}  # fmt: skip
FIGURES = {  # of each command: figures that must be there, by their paths
    "bench batches": "all_p99/0.9/fixed; quiet_p99_over_no_bound",
    "bench cascade --model bert": "work; random/points_lost; one_client/over_full; served/left_as_expected",
    "bench engine": "toy/var20/packed; toy/var100/packed_to/naive; int8_over_fp32",
    "bench generate": (
        "decode_ratio; tenants_100_over_32; early_cleaning; first_token_ms; token_outside_ms; gap_beside_prompt_ms; "
        "tenants/1/full/tokens_s; rates/0.5/hgpt/p99_ms; hgpt_over_full"
    ),
    "bench glue": (
        "c64_over_b; c64_over_c; c64_over_echo; c1_added_over_b_ms; batch16_over_b; processor_over_b; c64_grpc_over_b; "
        "processor_us/c64/engine; beyond_b_us/c1/tritonserver; beyond_b_us/batch16/upper; c1_waits/lookup"
    ),
    "bench job": "p50_over_alone; p99_over_alone; job_cores",
    "bench overload": "on_time_of_admitted; simulated_on_time_of_offered",
    "bench overload --policies fcfs das:row_tokens=64 --variance 2000": "drift/texts_per_s",
    "bench plot": "lookup_us; gather_us; both_to_sequential",
    "bench schedule": "rates/3.0; overhead_share",
    "bench serve --tenants 2": "added_over_noop_ms; share_of_bound",
    "bench sizing": "toy-16/req_per_s; toy-16/private_mb; toy-16/per_core/p99_200_ms; toy-16/cores_for_500/p99_200_ms",
    "comparison": "schemes/hplm/5; ratios/hplm_to_inprocess; memory/hplm/models_in_16_gb",
    "chaos --faults tenant": "sent; ok; recovery_s_max; memory_growth/engine; files_growth/toy-lookup",
    "chaos --registry bucket --faults bucket server manager 'stop toy-lookup'": "sent; ok; recovery_s_max",
    "isolation --quiet echo --noisy hugo --ways streams overload quota --quota-rate 2": (
        "overload/noisy/in_time; overload/beside/in_time_share; quota/noisy/not_answered/status 503"
    ),
    "isolation --door --quiet echo --ways body slow --body-mb 30 --bodies 2 --slow 100": (
        "body/in_time_by_server; body/holds; slow/strangers/refused"
    ),
    "papers alpaserve --seconds 1 --numbers 1 --picture a.svg": (
        "curves/Table 2: in time by deadline/search; curves/Fig. 17: in time by rate/search"
    ),
    "papers lanes --picture a.svg": "table/waiting queue/tail_ms_stated; lanes/2000/fixed over Eq. 6/times_as_long",
    "papers staging": "pipelined; no_retrieval; no_swapping; synchronous; pipelined_to_synchronous",
    "papers tcb --seconds 0.02 --numbers 1 --picture a.svg": "rows/64/DAS/utility; slots/chosen; to_concat/DAS var20/to_naive",
}
SERVED = "cascade", "generate", "glue", "job", "overload", "serve", "sizing"
LENT = {  # a shared server, and which name of a command means it, so that Triton need not start for each
    **{f"bench {name}": ("bare", f"bench.{'decoder_servers' if name == 'generate' else name}.TritonServer") for name in SERVED},
    "comparison": ("bare", "research.comparison.compare.TritonServer"),
    "chaos --faults": ("toy", "loadtest.chaos.__main__.ServedCopy"),
    "isolation": ("toy", "loadtest.isolation.ServedCopy"),
}

AWAITED = {  # seconds in which nothing happens that a figure without a meaning needs
    (chaos, "CALM"): 0.0, (bucket, "LEASE_S"): 4.0, (bucket, "LATER_S"): 1.0, (faults, "CHANGE_SECONDS"): 1.0,
    (isolation, "PUBLISHED_AFTER"): 0.0, (monitoring, "PUBLISHED_AFTER"): 0.0,
}  # fmt: skip


def lent_to(command: str) -> tuple[str, str] | None:
    return next((found for name, found in LENT.items() if command.startswith(name)), None)


def status(command: str) -> int:
    """Returns the exit status of a command, and prints what a program ends with, as Python does."""
    name, *words = shlex.split(command)
    try:
        return main(["bench", *words]) if name == "bench" else MAINS[name](words) or 0
    except SystemExit as ended:
        print(ended.code, file=sys.stderr)
        return 1


def numbers(found: object) -> Iterator[float]:
    for value in found.values() if isinstance(found, dict) else found if isinstance(found, list) else []:
        yield from [value] if isinstance(value, (int, float)) else numbers(value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(
            command,
            marks=pytest.mark.server(lent[0]) if (lent := lent_to(command)) else pytest.mark.xdist_group(f"command {number}"),
        )
        for number, command in enumerate(FIGURES)
    ],
)  # a process has all commands that ask one server; others do not wait for each other
def test_a_command_ends_with_its_figures(command: str, capfd, tmp_path, monkeypatch, request) -> None:
    """Some load models, so they take more than five seconds. `bench cluster`: tests/cluster/test_up.py."""
    monkeypatch.chdir(tmp_path)
    if lent := lent_to(command):
        server = request.getfixturevalue("server")
        served = partial(loading, server, with_alias=False) if lent[0] == "bare" else lambda *_: LentCopy(server)
        monkeypatch.setattr(lent[1], served)
        monkeypatch.setenv(chaos.INSIDE, str(tmp_path))  # else it starts again where its disks are small
    if "--door" in command:
        require_haproxy()
    if "--model" in command:
        save_bert(tmp_path / "bert")
    for (module, name), seconds in AWAITED.items():
        monkeypatch.setattr(module, name, seconds)
    with by_one_step(), loads_in_threads() if command.startswith("bench") else nullcontext():
        assert status(f"{command} --quick --json") == 0
    figures = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert None not in [at(figures, path) for path in FIGURES[command].split("; ")]
    assert all(math.isfinite(number) for number in numbers(figures)) and len(list(numbers(figures))) > 2
    assert "--picture" not in command or "<svg" in (tmp_path / "a.svg").read_text("utf-8")
    if "cascade" in command:
        assert status("bench cascade --quick") == 1  # the root was made from another model
        # Tabi's other ways use its store and exits.
        assert status("papers tabi --quick --json") == 0
        ways = json.loads(capfd.readouterr().out.splitlines()[-1])["ways"]
        assert ways.keys() == {*tabi.WAYS, "words pruned"}
        assert all(0 <= one["work"] <= 1.2 for way in ways.values() for one in way.values())


def test_only_the_named_benchmark_is_imported_and_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code = """import sys, bench, cyclopts
bench.register(cyclopts.App())
assert not sys.modules.keys() & {"torch", "numpy", "transformers", "builder", "loadtest", "testing"}"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)
    assert main(["bench"]) == 0
    listed, known = capsys.readouterr().out.splitlines()[4:], bench.benchmarks("hplm bench", bench.__path__)
    assert [line.split()[0] for line in listed] == list(known) and all(len(line.split()) > 3 for line in listed)
    assert {command.split()[1] for command in FIGURES if command.startswith("bench")} | {"cluster", "infinity"} == set(known)
    assert set(get_args(Size)) == set(SIZES) and get_args(EngineDtype) == ("auto", *ENGINE_DTYPES)


@pytest.mark.slow
def test_a_missed_target_is_a_failure_but_not_with_quick(capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch) -> None:
    folder = tmp_path / "measuring"
    folder.mkdir()
    (folder / "slow.py").write_text(
        '"""`hplm measure slow`: is slow."""\n'
        "from bench.rows import Row, benchmark\n@benchmark(most=2)\ndef slow(*, most: int = 1):\n"
        '    """Is slow."""\n    yield Row("share", 1.5, most=most)\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    run = partial(bench.start, "hplm measure", "measuring", [str(folder)])
    picture = tmp_path / "slow.svg"
    assert run(["slow", "--json", "--picture", str(picture)]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["missed"] == ["share"] and picture.stat().st_size
    assert run(["slow", "--most", "3"]) == 0 and "met" in capsys.readouterr().out
    assert run(["slow", "--quick"]) == 0 and "MISSED" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("bench serve --seconds 0", ["--seconds", "0.0"]),
        ("bench serve --tokens 1", ["--tokens 1", 3, 64]),
        ("bench overload --policies luck", ["policy", "'luck'"]),
        ("bench overload --packings dense", ["'dense'", "packed", "naive"]),
        ("bench overload --variance -1", ["--variance", "-1.0"]),
        ("bench plot --keys 1000000000000", ["TMPDIR", "--keys"]),
        ("bench plot --picture x.foo", ["--picture x.foo"]),
        ("bench luck", ["'luck'", "serve"]),
        ("papers tcb --deadlines-ms 5 1", ["--deadlines-ms", "5.0"]),
        ("papers timeline none --to trace", ["none"]),
        ("papers timeline journal --to trace", ["journal", "line 2"]),
        ("papers tabi", ["no questions", "hplm bench cascade"]),
        ("comparison --schemes hplm,plot", ["--schemes", "'plot'"]),
        ("comparison --lengths normal:20,20,3,600", ["--lengths 600"]),
        ("isolation --ways long", ["--noisy"]),
        ("isolation --rate nan", ["--rate", "nan"]),
        ("isolation --ways slow", ["--door"]),
        ("isolation --noisy beta --repository /nowhere", ["/nowhere"]),
        ("random --to . --tenants 3", ["--to"]),
    ],
)
def test_impossible_options_are_refused(capsys, tmp_path, monkeypatch, command: str, named: list) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "journal").write_text('{"request": "a"}\n[]\n')
    needed = {"isolation": " --backbone toy --quiet acme", "random": ""}  # others measure the machine first
    assert status(command + needed.get(command.split()[0], " --quick")) == 1
    assert mentions(capsys.readouterr().err, *named) and [file.name for file in tmp_path.iterdir()] == ["journal"]


def test_a_random_repository_is_whole_and_has_as_many_tenants(tmp_path) -> None:
    assert status(f"random --to {tmp_path / 'new'} --tenants 3 --size toy --dtype fp32") == 0
    (snapshot,) = Directory(tmp_path / "new", None).snapshots()
    assert [tenant.id for tenant in snapshot.tenants] == ["tenant-0", "tenant-1", "tenant-2"]
    assert main(["verify", "--repository", str(tmp_path / "new")]) == 0
