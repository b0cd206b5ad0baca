"""Imports and builds on a Ray cluster of two nodes: the same bytes as here, also if a worker and a node die."""

import json
import os
import pickle
import shutil
import signal
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from builder.store.store import Store
from tests.builder.importing.stores import make_imported_store, texts, tuned
from tests.builder.training.small_tenants import made, write
from tests.cli.commands import refused, run
from tests.support.here import CopiedWork, Here
from tests.support.message import mentions
from tests.support.wait import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
IMPORTED = ("one", "two", "three")


@pytest.fixture(scope="module")
def cluster():
    """A head without processors, and two nodes with one each."""
    if (found := imported_ray()) is None:
        pytest.skip("Ray is not installed: .venv/bin/pip install -e '.[ray]'")
    started = found.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    started.nodes = [started.add_node(num_cpus=1) for _ in range(2)]
    yield started
    started.shutdown()


def imported_ray():
    """Returns Ray's clusters of one machine, or None where Ray is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray.cluster_utils
    except ModuleNotFoundError:
        return None
    return ray.cluster_utils


def children(pid: int) -> list[int]:
    return [int(one) for task in Path(f"/proc/{pid}/task").iterdir() for one in (task / "children").read_text().split()]


def working(node) -> list[int]:
    """Returns the processes of a node that do a task of ours."""
    (raylet,) = node.all_processes["raylet"]
    return [pid for pid in children(raylet.process.pid) if b"_done_there" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def records(store: Path) -> dict[str, bytes]:
    return {file.parent.parent.name: file.read_bytes() for file in sorted(store.glob("tenants/*/1/*.safetensors"))}


def test_what_ray_builds_has_the_bytes_that_are_built_here_and_a_dead_worker_and_node_end_nothing(cluster, tmp_path, capsys):
    store, models = make_imported_store(tmp_path), tmp_path / "models"
    for name in IMPORTED:
        tuned(models / name)
    (models / "bad").mkdir()
    (models / "bad" / "config.json").write_text("{}")
    train = made(tmp_path, "classify", 40, 1).name
    tenants = ({"id": name, "task": "classify", "train": train, "epochs": 1} for name in ("acme",))
    file = write(tmp_path / "tenants.jsonl", tenants)
    importing = ["import", "--from", models, "--texts", texts(tmp_path, 60), "--rank", 2, "--epochs", 1, "--least", 0]
    importing, building = ([*words, "--device", "cpu", "--store"] for words in (importing, ["build", "tenants", file]))
    (here := tmp_path / "here").mkdir()
    for name in os.listdir(store):
        (here / name).symlink_to(store / name)
    with pytest.MonkeyPatch.context() as patch:  # with one thread, as the tests of this room have
        patch.setattr("builder.worker_processes.ProcessPoolExecutor", CopiedWork)
        patch.setattr("builder.worker_processes.ThreadPoolExecutor", Here)
        run(capsys, *importing, here, status=3)
        run(capsys, *building, here)
    faults = threading.Thread(target=break_both, args=[cluster])
    faults.start()
    answer = run(capsys, *importing, store, "--ray", cluster.address, status=3)
    faults.join()
    assert answer["imported"].keys() == set(IMPORTED) and answer["refused"].keys() == {"bad"}
    assert mentions(answer["refused"]["bad"]["why"], models / "bad")
    assert run(capsys, *building, store, "--ray", cluster.address)["built"].keys() == {"acme"}
    assert records(store) == records(here) and len(records(here)) == 4
    reports = [Store(folder).report(Store(folder).known_tenant("one")) for folder in (store, here)]
    assert reports[0]["imported"] == reports[1]["imported"]
    page = (store / "tenants/one/1/report.html").read_text("utf-8")
    assert "hplm-" not in page and not list(store.glob("building/tenants/*/*"))


def break_both(cluster):
    """Kills a worker of one node, and then the other node."""
    first, second = cluster.nodes
    eventually(lambda: working(first))
    os.kill(working(first)[0], signal.SIGKILL)
    eventually(lambda: working(second))
    cluster.remove_node(second, allow_graceful=False)


class Fake:
    """Stands for Ray: it does tasks in this process, from copies. The first task of `fails` dies."""

    class RayError(Exception):
        pass

    class RayTaskError(RayError):
        pass

    def __init__(self, fails=None):
        self.exceptions, self.fails, self.asked = self, fails, []

    def init(self, **given):
        self.asked.append(given)

    def remote(self, **options):
        return lambda function: SimpleNamespace(
            remote=partial(self.task, function), options=lambda **_: self.remote()(function)
        )

    def task(self, function, *given):
        if self.fails in given:
            self.fails = None
            return self.RayError("a node died")
        return function(*pickle.loads(pickle.dumps(given)))

    def get(self, thing):
        if isinstance(thing, Exception):
            raise thing
        return thing

    def put(self, thing):
        return thing

    def cluster_resources(self):
        return {"CPU": 1}

    def nodes(self):
        return [{"NodeID": "one", "Alive": True}]

    def wait(self, tasks, **_):
        assert all(task is None for task in tasks)

    def shutdown(self):
        self.asked.append("shutdown")

    NodeAffinitySchedulingStrategy = SimpleNamespace


@pytest.fixture
def fake(monkeypatch, tmp_path):
    found = Fake()
    monkeypatch.setattr("builder.ray_workers.import_module", lambda name: found)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return found


@pytest.mark.usefixtures("in_this_process", "no_pictures", "one_step")
def test_a_task_gets_all_that_it_reads_and_its_files_come_back_as_if_they_were_made_here(fake, imported, tmp_path, capsys):
    """The folder to import and the model that the store was made from are not where the task looks for them."""
    store, here, models = (Path(tmp_path / name) for name in ("store", "here", "models"))
    for folder in (store, here):
        shutil.copytree(imported, folder)
    for name in ("one", "two"):
        tuned(models / name)
    (models / "bad").mkdir()
    (models / "bad" / "config.json").write_text("{}")
    (models / "one" / "optimizer.pt").write_text("not sent")
    command = ["import", "--from", models, "--texts", texts(tmp_path, 60), "--rank", 2, "--device", "cpu"]
    fake.fails = "two"
    for _ in range(2):  # the second time nothing is learned
        answer = run(capsys, *command, "--least", 0, "--store", store, "--ray", "auto", status=3)
        assert answer["imported"].keys() == {"one", "two"} and mentions(answer["refused"]["bad"]["why"], models / "bad")
    assert fake.asked[0]["address"] == "auto" and fake.asked[1] == "shutdown" and fake.fails is None
    run(capsys, *command, "--least", 0, "--store", here, status=3)
    for name in ("one", "two"):
        shutil.rmtree(store / "tenants" / name)
    refusing = [*command, "--least", 1, "--epochs", 2, "--store", store, "--ray", "auto"]
    assert run(capsys, *refusing, status=3)["refused"].keys() == {"one", "two", "bad"}
    assert {file.name for file in (store / "refused").iterdir()} == {"one.pt", "two.pt"}
    refusing[refusing.index("--least") + 1] = 0
    assert run(capsys, *refusing, status=3)["imported"].keys() == {"one", "two"} and not [*(store / "refused").iterdir()]
    shutil.rmtree(store / "tenants")
    run(capsys, *command, "--least", 0, "--store", store, "--ray", "auto", status=3)
    assert records(store) == records(here) and len(records(here)) == 2
    reports = [json.loads((folder / "tenants/one/1/report.json").read_text()) for folder in (store, here)]
    assert reports[0]["imported"] == reports[1]["imported"] and "hplm-" not in (store / "tenants/one/1/report.html").read_text()
    assert not [*tmp_path.glob("hplm-*"), *store.glob("building/tenants/*/*")]


@pytest.mark.usefixtures("in_this_process", "no_pictures", "one_step")
def test_builds_on_ray_go_on_from_the_versions_that_are_here(fake, store, tmp_path, capsys, monkeypatch):
    """The variable RAY_ADDRESS alone changes nothing."""
    monkeypatch.setenv("RAY_ADDRESS", "nowhere:1")
    files = [made(tmp_path, "classify", 40, seed) for seed in (1, 2)]
    for number, train in enumerate(files, start=1):
        line = {"id": "acme", "task": "classify", "train": train.name, "epochs": 1, "rank": 2}
        file = write(tmp_path / "tenants.jsonl", [line])
        answer = run(capsys, "build", "tenants", file, "--device", "cpu", "--store", store.folder, "--ray", "host:6379")
        assert (answer["built"]["acme"]["version"], answer["built"]["acme"]["new"]) == (number, True)
    run(capsys, "build", "tenants", file, "--device", "cpu", "--store", store.folder)
    assert [one["address"] for one in fake.asked if one != "shutdown"] == ["host:6379"] * 2
    report = store.report(store.known_tenant("acme"))
    assert report["from_version"] == 1 and report["training"]["file"] == str(files[1])


def test_without_a_cluster_or_ray_the_way_out_is_named(fake, store, tmp_path, capsys, monkeypatch):
    file = write(
        tmp_path / "tenants.jsonl", [{"id": "acme", "task": "classify", "train": made(tmp_path, "classify", 20, 1).name}]
    )
    command = ["build", "tenants", file, "--store", store.folder]
    monkeypatch.setattr(fake, "init", Mock(side_effect=ConnectionError("no head at nowhere\nmore")))
    assert mentions(refused(capsys, *command, "--ray", "nowhere:1"), "--ray nowhere:1", "no head", "auto")
    monkeypatch.setattr("builder.ray_workers.import_module", gone)
    assert mentions(refused(capsys, *command, "--ray", "auto"), "--ray", "pip install", "ray")


def gone(name):
    raise ModuleNotFoundError(name)
