"""A tenant's next version: trained on top of the one before where data are new, from where that one started where not."""

import json
import os
import random
import shutil
import signal
from dataclasses import replace

import pytest
import torch

from builder.store.store import Store, TenantFile
from builder.training import finetuning, grid
from builder.training.material import Material
from builder.training.scores import Scores
from builder.training.start import ANEW
from builder.training.tenant import build_tenant, delete_tenant, warnings_of
from hplm.cli.main import main
from hplm.errors import InvalidInput
from testing.random_store import random_tenant
from tests.builder.tables.branches import CPU, build, some_lines
from tests.builder.training.small_tenants import CUT, TASKS, classified, learn, made, write
from tests.builder.training.test_cut_training import dies, killed
from tests.support.message import mentioning, mentions

pytestmark = pytest.mark.slow

STILL = 1e-12  # a learning rate that changes no stored weight


def some(folder, name, count, seed):
    rng, (task, maker, *_) = random.Random(seed), TASKS[name]
    return task, write(folder / f"{name}-{seed}.jsonl", [maker(rng) for _ in range(count)])


def weights(store, tenant, version):
    adapter, head = store.tenant_weights(store.tenant_version(tenant, version))
    return {f"{i}/{name}": part for i, layer in enumerate([*adapter, head]) for name, part in layer.items()}


def change(store, left, right):
    """Returns the largest difference between two versions' weights: each a pair of tenant and version."""
    ours, theirs = weights(store, *left), weights(store, *right)
    return max(float((ours[name].float() - theirs[name].float()).abs().max()) for name in ours)


@pytest.mark.parametrize("name", ["classify", "regress", "span"])
def test_new_data_are_learned_on_top_of_the_newest_version(store, tmp_path, name, capsys):
    task, first = some(tmp_path, name, 60, 1)
    _, second = some(tmp_path, name, 40, 2)
    learn(store, task, first, epochs=2)
    tenant = learn(store, task, second, epochs=1, learning_rate=STILL)
    assert tenant.version == 2 and mentions(capsys.readouterr().err, "acme", 1, "--fresh")
    report = store.report(tenant)
    assert report["from_version"] == 1 and report["at_start"]["dev"] == pytest.approx(report["history"][0]["dev"], abs=1e-4)
    largest = max(float(part.abs().max()) for part in weights(store, "acme", 1).values())
    assert change(store, ("acme", 1), ("acme", 2)) <= 2e-3 * largest  # a value's head is normalised again, and rounded
    learn(store, task, first, tenant="other", epochs=2)
    assert change(store, ("acme", 1), ("other", 1)) == 0


def test_a_cut_adapter_is_trained_on_as_well(store, tmp_path):
    """Its upper layers start with the change that the adapter holds."""
    learn(store, "classify", made(tmp_path, "classify", 60, 1), epochs=2, **CUT)
    still = {**CUT, "body_rate": STILL, "learning_rate": STILL}
    report = store.report(learn(store, "classify", made(tmp_path, "classify", 60, 2), epochs=1, **still))
    assert report["from_version"] == 1 and report["change_held"] > 0.999
    (old, _), (new, _) = (store.tenant_weights(store.tenant_version("acme", version)) for version in (1, 2))
    for before, after in zip(old, new, strict=True):
        for place in ("query", "ffn_out"):
            products = [layer[f"{place}/b"].float() @ layer[f"{place}/a"].float() for layer in (before, after)]
            assert torch.allclose(*products, atol=2e-3 * float(products[0].abs().max())) and products[0].abs().max() > 0


def test_a_version_can_be_named_and_a_fresh_one_forgets(store, tmp_path):
    files = [made(tmp_path, "classify", 60, seed) for seed in (1, 2, 3)]
    learn(store, "classify", files[0], epochs=1)
    learn(store, "classify", files[1], epochs=2)
    learn(store, "classify", files[2], epochs=1, learning_rate=STILL, from_version=1)
    assert change(store, ("acme", 1), ("acme", 3)) == 0 < change(store, ("acme", 2), ("acme", 3))
    assert store.report(store.tenant("acme"))["from_version"] == 1
    fresh = learn(store, "classify", files[2], epochs=1, from_version=ANEW)
    learn(store, "classify", files[2], tenant="other", epochs=1)
    assert fresh.version == 4 and change(store, ("acme", 4), ("other", 1)) == 0
    assert "at_start" not in store.report(fresh)
    with pytest.raises(InvalidInput, match=mentioning("'acme'", 7, "1, 2, 3, 4")):
        learn(store, "classify", files[0], from_version=7)
    with pytest.raises(InvalidInput, match=mentioning("'new'", 1)):
        learn(store, "classify", files[0], tenant="new", from_version=1)


def test_the_same_command_again_changes_nothing(store, tmp_path, capsys):
    first, second = (made(tmp_path, "classify", 60, seed) for seed in (1, 2))
    for file, versions in ((first, (1, 1)), (second, (2, 2))):
        assert [learn(store, "classify", file, epochs=1).version for _ in versions] == list(versions)
        assert mentions(capsys.readouterr().err, "acme", versions[0], "--fresh")
    moved = second.rename(tmp_path / "moved.jsonl")
    assert learn(store, "classify", moved, epochs=1).version == 2
    assert learn(store, "classify", moved, epochs=1, from_version=1).version == 2
    assert learn(store, "classify", moved, epochs=1, from_version=ANEW).version == 3
    assert learn(store, "classify", moved, epochs=1, from_version=ANEW).version == 4


def test_data_that_were_learned_are_learned_from_where_that_version_started(store, tmp_path, capsys):
    first, second = (made(tmp_path, "classify", 60, seed) for seed in (1, 2))
    learn(store, "classify", first, epochs=1)
    again = learn(store, "classify", first, epochs=2)
    assert again.version == 2 and mentions(capsys.readouterr().err, "acme", 1, "anew", "--from-version")
    learn(store, "classify", first, tenant="other", epochs=2)
    assert change(store, ("acme", 2), ("other", 1)) == 0
    learn(store, "classify", second, epochs=1)
    learn(store, "classify", second, epochs=1, learning_rate=STILL)
    assert store.report(store.tenant("acme"))["from_version"] == 2 and change(store, ("acme", 2), ("acme", 4)) == 0
    on_top = learn(store, "classify", second, epochs=1, learning_rate=STILL, from_version=3)
    assert on_top.version == 5 and change(store, ("acme", 3), ("acme", 5)) == 0


def test_a_new_table_is_new_to_data_that_were_learned(store, tmp_path):
    train = made(tmp_path, "classify", 60, 1)
    build(store, tmp_path, "bio", some_lines(200, seed=2))
    learn(store, "classify", train, epochs=1)
    moved = build_tenant(store, "acme", "bio", None, train, device=CPU, show_progress=False, epochs=1)
    assert (moved.version, moved.domain) == (2, "bio") and store.report(moved)["from_version"] == ANEW


def test_a_next_version_keeps_what_is_not_given(store, tmp_path):
    build(store, tmp_path, "bio", some_lines(200, seed=2))
    first, second, third = (made(tmp_path, "classify", 60, seed) for seed in (1, 2, 3))
    common = ["build", "tenant", "--store", str(store.folder), "--id", "acme", "--epochs", "1", "--device", "cpu", "--json"]
    assert main([*common, "--train", str(first)]) == 1
    form = ["--adapter", "lora", "--rank", "3", "--places", "query,ffn_in", "--dtype", "bf16"]
    assert main([*common, "--train", str(first), "--task", "classify", "--domain", "bio", *form]) == 0
    assert main([*common, "--train", str(second)]) == 0
    old, new = (store.tenant_version("acme", version) for version in (1, 2))
    assert replace(old, version=2) == new and new.places == ("query", "ffn_in")
    assert main([*common, "--train", str(third), "--rank", "4"]) == 1
    assert main([*common, "--train", str(third), "--rank", "4", "--fresh"]) == 0
    assert main([*common, "--train", str(first), "--adapter", "bottleneck", "--fresh"]) == 0
    newest = store.tenant("acme")
    assert (newest.version, newest.adapter, newest.rank, newest.places) == (4, "bottleneck", 32, None)


def test_the_command_says_where_it_started(store, tmp_path, capsys):
    first, second = (made(tmp_path, "classify", 60, seed) for seed in (1, 2))
    common = ["build", "tenant", "--store", str(store.folder), "--id", "acme", "--task", "classify", "--epochs", "1"]
    told = []
    for file in (first, second):
        assert main([*common, "--train", str(file), "--json"]) == 0
        told.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert [(one["version"], one["from_version"]) for one in told] == [(1, ANEW), (2, 1)]
    with pytest.raises(SystemExit):
        main([*common, "--train", str(first), "--fresh", "--from-version", "1"])


def test_options_that_do_not_fit_the_start_are_refused(store, tmp_path):
    learn(store, "classify", made(tmp_path, "classify", 60, 1), epochs=1)
    more = made(tmp_path, "classify", 60, 2)
    with pytest.raises(InvalidInput, match=mentioning("'acme'", 1, "bottleneck", 8, "lora", "--fresh")):
        learn(store, "classify", more, adapter="lora")
    assert learn(store, "classify", more, epochs=1, dtype="bf16").dtype == "bf16"


def test_new_data_may_lack_labels_but_not_add_any(store, tmp_path):
    def file(name, labels):
        rows = [{"text": f"{name} {i}", "label": label} for i, label in enumerate(labels * 10)]
        return write(tmp_path / f"{name}.jsonl", rows)

    first = learn(store, "classify", file("first", ["c", "a", "b"]), epochs=1)
    fewer = learn(store, "classify", file("fewer", ["b", "c"]), epochs=1)
    assert fewer.labels == first.labels == ["a", "b", "c"]
    report = store.report(fewer)
    assert report["labels_without_examples"] == ["a"] and mentions("".join(warnings_of(report)), "a")
    with pytest.raises(InvalidInput, match=mentioning("'acme'", 2, "['d']", "--id")):
        learn(store, "classify", file("more", ["a", "b", "c", "d"]), epochs=1)
    with pytest.raises(InvalidInput, match=mentioning("'acme'", 2, "['b']", "--id")):
        learn(store, "classify", file("other", ["a", "c"]), epochs=1, from_version=ANEW)
    with pytest.raises(InvalidInput, match=mentioning("'b'")):
        learn(store, "classify", file("one", ["b"]), epochs=1)


def test_a_training_that_makes_the_tenant_worse_keeps_the_start(store, tmp_path, monkeypatch):
    learn(store, "classify", made(tmp_path, "classify", 60, 1), epochs=1)
    scores = iter([0.9, 0.2, 0.3, 0.9])
    monkeypatch.setattr(finetuning, "evaluate", lambda *_: (Scores(100, "accuracy", {"accuracy": next(scores)}), 1.0))
    report = store.report(learn(store, "classify", made(tmp_path, "classify", 60, 2), epochs=2))
    assert (report["best_epoch"], report["kept_epoch"], report["at_start"]["dev"]) == (0, 0, 0.9)
    assert change(store, ("acme", 1), ("acme", 2)) == 0
    assert any(mentions(warning, 1) for warning in warnings_of(report))


@pytest.mark.parametrize("kind, head", [("bottleneck", None), ("bottleneck", "tanh"), ("lora", "gelu")])
def test_a_tenant_that_was_not_trained_here_is_trained_on(store, tmp_path, kind, head):
    imported = TenantFile("acme", 1, "root", 1, "classify", ["right", "left"], 4, kind, function="gelu", head_function=head)
    random_tenant(store, imported, 0.3, seed=1)
    train = made(tmp_path, "classify", 60, 1)
    form = {"store": store, "task": "classify", "train": train, "epochs": 1, "learning_rate": STILL}
    tenant = learn_as_it_is(**form)
    assert replace(tenant, version=1) == imported
    assert change(store, ("acme", 1), ("acme", 2)) < 1e-3  # random weights were not rounded to 16 bits
    fresh = learn_as_it_is(**form, from_version=ANEW)
    assert replace(fresh, version=1) == imported and change(store, ("acme", 1), ("acme", 3)) > 0.1


def learn_as_it_is(store, task, train, **options):
    return build_tenant(store, "acme", None, None, train, show_progress=False, device=CPU, **options)


def test_every_point_of_a_grid_goes_on_from_the_same_version(store, tmp_path, monkeypatch):
    monkeypatch.setattr(grid, "processes_that_fit", lambda wanted: 1)
    learn(store, "classify", made(tmp_path, "classify", 60, 1), epochs=1)
    learn(store, "classify", made(tmp_path, "classify", 60, 2), epochs=1, learning_rate=STILL, grid=True)
    report = store.report(store.tenant("acme"))
    assert report["from_version"] == 1 and len(report["grid"]) == 6 and change(store, ("acme", 1), ("acme", 2)) == 0


def test_a_killed_training_on_top_of_a_version_ends_with_the_same_bytes(store, tmp_path):
    first, second = (made(tmp_path, "classify", 60, seed) for seed in (1, 2))
    for tenant in ("whole", "cut"):
        learn(store, "classify", first, tenant=tenant, epochs=1)
    learn(store, "classify", second, tenant="whole", epochs=3)
    for at_save in (1, 6, 12):
        killed(store, second, "cut", at_save)
    assert learn(store, "classify", second, tenant="cut", epochs=3).version == 2
    assert change(store, ("whole", 2), ("cut", 2)) == 0
    told = [store.report(store.tenant(tenant)) for tenant in ("whole", "cut")]
    assert [told[0][name] == told[1][name] for name in ("at_start", "history", "from_version")] == [True] * 3


def test_a_fresh_command_interrupted_after_its_tenant_is_stored_makes_one_version(store, tmp_path, monkeypatch):
    train, save = made(tmp_path, "classify", 60, 1), Store.save_tenant
    learn(store, "classify", train, epochs=1)

    def work():
        def saved(self, *given):
            save(self, *given)
            os.kill(os.getpid(), signal.SIGKILL)

        Store.save_tenant = saved
        learn(store, "classify", train, epochs=1, from_version=ANEW)

    dies(work)
    assert learn(store, "classify", train, epochs=1, from_version=ANEW).version == 2
    assert learn(store, "classify", train, epochs=1, from_version=ANEW).version == 3


def test_a_deleted_tenant_leaves_nothing_behind(store, tmp_path, capsys):
    for seed in (1, 2):
        learn(store, "classify", made(tmp_path, "classify", 60, seed), epochs=1)
    learn(store, "classify", made(tmp_path, "classify", 60, 1), tenant="other", epochs=1)
    command = ["tenant", "delete", "acme", "--store", str(store.folder)]
    assert main([*command, "--state", str(tmp_path)]) == 1 and mentions(capsys.readouterr().err, "--store", "--state")
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"tenant": "acme", "removed": [1, 2]}
    assert [tenant.id for tenant in store.tenants()] == ["other"] and not list(store.folder.rglob("*acme*"))
    assert main(command) == 1 and mentions(capsys.readouterr().err, "'acme'", "other")
    assert learn(store, "classify", made(tmp_path, "classify", 60, 1), epochs=1).version == 1


def test_a_tenant_whose_training_was_interrupted_is_not_deleted(store, tmp_path):
    learn(store, "classify", made(tmp_path, "classify", 60, 1), epochs=1)
    killed(store, made(tmp_path, "classify", 60, 2), "acme", 3)
    with pytest.raises(InvalidInput, match=mentioning("'acme'", store.tenant_work_folder("acme"))):
        delete_tenant(store, "acme")
    assert store.tenant_versions("acme") == [1]


def test_an_interrupted_deletion_can_be_repeated(store, tmp_path, monkeypatch):
    learn(store, "classify", made(tmp_path, "classify", 60, 1), epochs=1)
    with monkeypatch.context() as cut, pytest.raises(KeyboardInterrupt):
        cut.setattr(shutil, "rmtree", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        delete_tenant(store, "acme")
    assert store.tenants() == []
    learn(store, "classify", made(tmp_path, "classify", 60, 1), epochs=1)
    assert delete_tenant(store, "acme") == [1] and not (store.folder / "removed").exists()


def test_texts_keep_their_side_when_a_file_grows(store, tmp_path):
    rng = random.Random(0)
    rows = [classified(rng) for _ in range(300)]
    rows = [dict(row, text=f"{row['text']} {i}") for i, row in enumerate(rows)]
    files = [write(tmp_path / f"{count}.jsonl", rows[:count]) for count in (100, 110, 300)]
    learn(store, "classify", files[0], epochs=1)
    start = store.tenant("acme")
    before = Material(store.folder, "root", 1, "classify", files[0], None).read()
    learned = {example.text for example in before.training.examples}
    for file, count in zip(files[1:], (110, 300), strict=True):
        grown = Material(store.folder, "root", 1, "classify", file, None, tuple(start.labels), start=start).read()
        held = {example.text for example in grown.dev.examples}
        assert not held & learned and {example.text for example in before.dev.examples} <= held
        assert 0.05 * count < len(held) < 0.17 * count and grown.divided.below == before.divided.below
