"""A killed training continues where it stopped, to the same bytes, and a grid trains no point twice."""

import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from builder.store import savepoint
from builder.store.store import Store
from builder.tables.build_folder import held
from builder.training import grid
from builder.training import tenant as tenants
from builder.training.finetuning import TrainingOptions
from hplm.errors import HplmError, InvalidInput
from tests.builder.tables.branches import build, some_lines
from tests.builder.training.small_tenants import CUT, learn, made
from tests.support.message import mentioning, mentions

pytestmark = pytest.mark.slow

FILES = ("adapter.safetensors", "head.safetensors", "tenant.json")


def trained(store, train, tenant, **options):
    learn(store, "classify", train, tenant=tenant, epochs=3, **options)
    folder = store.tenant_folder(tenant, 1)
    report = json.loads((folder / "report.json").read_text())
    return [(folder / name).read_bytes().replace(tenant.encode(), b"") for name in FILES], report


def killed(store, train, tenant, at_save, **options):
    """Runs in a process of its own, which is killed just after it has written a savepoint."""

    def work():
        savepoint.SECONDS_BETWEEN, saves, replace = 0.0, 0, os.replace

        def dying(source, target):
            nonlocal saves
            if str(target).endswith("training.pt"):
                saves += 1
                if saves == at_save:
                    os.kill(os.getpid(), signal.SIGKILL)
            replace(source, target)

        os.replace = dying
        trained(store, train, tenant, **options)

    dies(work)


def dies(work):
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("options, saves", [({}, (1, 4, 9, 18)), (CUT, (1, 18)), ({"dropout": 0.1}, (1, 18))])
def test_a_killed_training_ends_with_the_same_bytes(store, tmp_path, monkeypatch, options, saves):
    train = made(tmp_path, "classify", 60, 1)
    undisturbed, report = trained(store, train, "whole", **options)
    steps, load = [], savepoint.Savepoint.load

    def told(self):
        state = load(self)
        steps.append(state["course"]["step"] if state is not None else 0)
        return state

    monkeypatch.setattr(savepoint.Savepoint, "load", told)
    for number, at_save in enumerate(saves):
        tenant = f"cut-{number}"
        killed(store, train, tenant, at_save, **options)
        assert not store.tenant_folder(tenant, 1).exists()
        again, its_report = trained(store, train, tenant, **options)
        assert again == undisturbed
        assert its_report["history"] == report["history"] and its_report["best_epoch"] == report["best_epoch"]
        assert not (store.folder / "building" / "tenants" / tenant).exists()
    assert steps[0] == 0 and steps == sorted(steps) and steps[-1] > 10  # they continued


def test_after_a_kill_while_it_is_stored_a_tenant_does_not_exist_yet(store, tmp_path):
    train = made(tmp_path, "classify", 60, 1)

    def work():
        tenants.draw_training = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        trained(store, train, "acme")

    dies(work)
    assert (store.folder / "tenants/acme/1.writing/tenant.json").exists() and store.tenants() == []
    _, report = trained(store, train, "acme")
    assert [tenant.version for tenant in store.tenants()] == [1] and store.report(store.tenant("acme")) == report


def test_a_finished_training_removes_its_plan_last(store, tmp_path, monkeypatch):
    """Without the plan, another command would continue from the remaining files."""
    working, removed, save, unlink = store.folder / "building/tenants/acme", [], Store.save_tenant, os.unlink

    def saved(self, *given):
        save(self, *given)
        for number in range(20):
            (working / f"point-{number}.done").touch()

    def noted(path, *given, **more):
        removed.append(Path(path).name)
        unlink(path, *given, **more)

    monkeypatch.setattr(Store, "save_tenant", saved)
    monkeypatch.setattr(os, "unlink", noted)
    trained(store, made(tmp_path, "classify", 60, 1), "acme")
    assert len(removed) > 20 and removed[-1] == "plan.json" and not working.exists()


def test_a_new_table_of_the_same_name_and_version_starts_a_new_training(store, tmp_path, capsys):
    train = made(tmp_path, "classify", 60, 1)
    killed(store, train, "cut", 6)
    shutil.rmtree(store.table_folder("root", 1))
    (tmp_path / "again").mkdir()
    build(store, tmp_path / "again", "root", some_lines(200, seed=2))
    again, _ = trained(store, train, "cut")
    assert mentions(capsys.readouterr().err, "cut")
    assert again == trained(store, train, "whole")[0]


def test_a_tenant_is_trained_by_one_process_at_a_time(store, tmp_path):
    train = made(tmp_path, "classify", 60, 1)
    with (
        held(store.folder / "building/tenants/acme", "the other's"),
        pytest.raises(InvalidInput, match="'acme'"),
    ):
        learn(store, "classify", train, epochs=1)
    with pytest.raises(InvalidInput, match=mentioning(tmp_path / "none.jsonl")):
        learn(store, "classify", tmp_path / "none.jsonl", epochs=1)
    assert learn(store, "classify", train, epochs=1).version == 1


def test_refused_options_do_not_remove_an_interrupted_training(store, tmp_path, capsys):
    train, places = made(tmp_path, "classify", 60, 1), ("attention_out", "ffn_out")
    undisturbed, _ = trained(store, train, "whole", places=places)
    killed(store, train, "cut", 6, places=places)
    with pytest.raises(InvalidInput, match="'fnf_out'"):
        trained(store, train, "cut", places=("attention_out", "fnf_out"))
    assert (store.folder / "building/tenants/cut/training.pt").exists()
    assert trained(store, train, "cut", places=places)[0] == undisturbed and not capsys.readouterr().err


def test_other_data_or_options_start_a_new_training(store, tmp_path, capsys):
    train = made(tmp_path, "classify", 60, 1)
    undisturbed, _ = trained(store, train, "whole", seed=7)
    killed(store, train, "cut", 6)
    again, _ = trained(store, train, "cut", seed=7)
    assert again == undisturbed
    assert mentions(capsys.readouterr().err, "cut")


def test_the_best_point_of_a_grid_is_kept_and_none_is_trained_twice(store, tmp_path, monkeypatch):
    train, trainings = made(tmp_path, "classify", 80, 1), []
    monkeypatch.setattr(grid, "processes_that_fit", lambda wanted: 1)
    learned = grid.train

    def counted(body, ground, options, *rest, **more):
        if len(trainings) == 4:
            trainings.append(None)
            raise KeyboardInterrupt
        trainings.append(options)
        return learned(body, ground, options, *rest, **more)

    monkeypatch.setattr(grid, "train", counted)
    with pytest.raises(KeyboardInterrupt):
        trained(store, train, "acme", grid=True)
    _, report = trained(store, train, "acme", grid=True)
    done = [options for options in trainings if options is not None]
    assert len(done) == len(set(done)) == 6
    tried = report["grid"]
    assert {(point["learning_rate"], point["batch_texts"]) for point in tried} == {
        (rate, batch) for rate in (1e-3, 2e-3, 4e-3) for batch in (8, 32)
    }
    best = max(tried, key=lambda point: point["dev"])
    assert (report["learning_rate"], report["batch_texts"]) == (best["learning_rate"], best["batch_texts"])
    assert report["dev"]["accuracy"] == best["dev"]


def test_a_point_that_diverges_does_not_end_the_others(store, tmp_path, monkeypatch):
    train, learned = made(tmp_path, "classify", 60, 1), grid.train
    monkeypatch.setattr(grid, "processes_that_fit", lambda wanted: 1)
    monkeypatch.setattr(grid, "BATCHES", (32,))

    def fragile(body, ground, options, *rest, **more):
        if options.learning_rate > most:
            raise grid.Diverged("training diverged")
        return learned(body, ground, options, *rest, **more)

    monkeypatch.setattr(grid, "train", fragile)
    most, threads = 2e-3, torch.get_num_threads()
    _, report = trained(store, train, "acme", grid=True)
    assert [point["dev"] is None for point in report["grid"]] == [False, False, True]
    assert report["learning_rate"] <= most and torch.get_num_threads() == threads
    most = 0.0
    with pytest.raises(HplmError, match="--learning-rate"):
        trained(store, train, "beta", grid=True)


def test_points_side_by_side_are_the_same_as_one_after_the_other(store, tmp_path, monkeypatch):
    train = made(tmp_path, "classify", 60, 1)
    monkeypatch.setattr(grid, "FACTORS", (1.0,))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    results = []
    for tenant, workers in (("one", 1), ("two", 2)):
        monkeypatch.setattr(grid, "processes_that_fit", lambda wanted, workers=workers: workers)
        results.append(trained(store, train, tenant, grid=True))
    torch.set_num_threads(threads)
    assert results[0][0] == results[1][0] and results[0][1]["grid"] == results[1][1]["grid"]


def test_at_least_one_point_runs_at_a_time():
    assert 1 <= grid.processes_that_fit(1000) <= len(os.sched_getaffinity(0))
    assert grid.processes_that_fit(1) == 1
    assert [point.batch_texts for point in grid.points(TrainingOptions())] == [8, 32] * 3
