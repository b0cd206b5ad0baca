"""Which version a command makes, what it starts from, and what stays after an interruption. Nothing is trained here."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from builder.exits.build import build_exits
from builder.students.build import build_students
from builder.students.options import StudentOptions
from builder.tables.build_folder import locked_folder
from builder.training.build import build_tenant, delete_tenant
from builder.training.start import ANEW
from hplm.engine.engine import resolve_precision
from hplm.errors import InvalidInput
from tests.builder.stores import build, cut, give_other_values, interrupted, nothing_looked_up, some_lines
from tests.builder.training.small_tenants import made, pretend, unexpected, untrained, write
from tests.cli.commands import refused, run
from tests.support.device import DEVICE
from tests.support.learning import by_one_step
from tests.support.message import mentioning, mentions

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_pictures")]

RATE = 2e-3  # by which `untrained` moves each bias
SILENT = {"device": DEVICE, "trainer": untrained}


@pytest.mark.parametrize("seed", range(2))
def test_versions_start_where_a_plain_model_says(store, tmp_path, seed):
    """Many commands with few files and options, of which some are interrupted."""
    chance = random.Random(seed)
    files = [made(tmp_path, "classify", 20, number) for number in range(3)]
    known, begun = [], None  # (what was asked, its start, trainings in a row); an interrupted command and its start
    for _ in range(40):
        asked_for = chance.randrange(3), chance.choice([1, 2])  # file and epochs
        wanted = chance.choice([None, None, None, ANEW, 1, 2, 5, 9])
        is_cut = chance.random() < 0.3
        give = partial(pretend, store, "classify", files[asked_for[0]], epochs=asked_for[1], from_version=wanted)
        newest, its_start = known[-1][:2] if known else (None, ANEW)
        if wanted is not None and wanted > len(known):  # a start comes before its version, so this is none
            with pytest.raises(InvalidInput, match=mentioning(f"--from-version {wanted}", "'acme'")):
                give()
            continue
        if newest == asked_for and wanted != ANEW and wanted in (None, its_start):
            assert give(trainer=unexpected).version == len(known)
            begun = None
            continue
        if wanted is not None:
            start = wanted
        elif begun is not None and begun[0] == asked_for:
            start = begun[1]
        else:
            start = its_start if newest is None or newest[0] == asked_for[0] else len(known)
        if is_cut:
            with pytest.raises(KeyboardInterrupt):
                give(trainer=interrupted)
            begun = asked_for, start
            continue
        tenant = give()
        known.append((asked_for, start, known[start - 1][2] + 1 if start else 1))
        begun = None
        assert tenant.version == len(known) and store.report(tenant)["from_version"] == start
        assert store.tenant_weights(tenant)[1]["bias"].tolist() == pytest.approx([RATE * known[-1][2]] * 2, rel=0.02)
        assert not (store.folder / "building/tenants/acme").exists()
    assert len(known) > 5


def test_a_next_version_keeps_the_form_and_the_labels(store, tmp_path, capsys):
    """A new table is new to data that were learned on another one."""
    build(store, tmp_path, "bio", some_lines(200, seed=2))
    first, second = (made(tmp_path, "classify", 20, seed) for seed in (1, 2))
    form = {"adapter": "lora", "rank": 3, "places": ("query", "ffn_in"), "dtype": "bf16"}
    old = build_tenant(store, "acme", "bio", "classify", first, **form, **SILENT)
    new = build_tenant(store, "acme", None, None, second, **SILENT)
    assert new == replace(old, version=2) and new.places == ("query", "ffn_in") and new.labels == ["left", "right"]
    more = made(tmp_path, "classify", 20, 3)
    with pytest.raises(InvalidInput, match=mentioning("'acme'", 2, "lora", 3, 4, "--fresh")):
        build_tenant(store, "acme", None, None, more, rank=4, **SILENT)
    assert build_tenant(store, "acme", None, None, more, rank=4, from_version=ANEW, **SILENT).rank == 4
    capsys.readouterr()
    there = build_tenant(store, "acme", "root", None, more, **SILENT)
    assert (there.version, there.domain) == (4, "root") and mentions(capsys.readouterr().err, "acme", "--from-version 3")
    with pytest.raises(InvalidInput, match=mentioning("'new'", 1)):
        pretend(store, "classify", first, tenant="new", from_version=1)
    bare = build_tenant(store, "bare", "root", "tag", made(tmp_path, "tag", 20, 1), rank=0, **SILENT)
    assert store.tenant_weights(bare)[0] is None


def test_new_data_may_lack_labels_but_not_add_any(store, tmp_path):
    def file(labels):
        rows = [{"text": f"{labels} {i}", "label": one} for i, one in enumerate(labels * 10)]
        return write(tmp_path / f"{labels}.jsonl", rows)

    first, fewer = pretend(store, "classify", file("cab")), pretend(store, "classify", file("bc"))
    assert fewer.labels == first.labels == ["a", "b", "c"]
    report = store.report(fewer)
    assert mentions(report["warnings"], "no examples of a:")
    with pytest.raises(InvalidInput, match=mentioning("'acme'", "classify", "multilabel", "--id")):
        pretend(store, "multilabel", file("abc"))
    for labels, options, named in [
        ("abcd", {}, ["'acme'", 2, "'d'", "--new-labels", "--id"]),
        ("ac", {"from_version": ANEW}, ["'acme'", 2, "'b'", "--id"]),
        ("b", {}, ["'b'"]),
    ]:
        with nothing_looked_up(), pytest.raises(InvalidInput, match=mentioning(*named)):
            pretend(store, "classify", file(labels), **options)
    with pytest.raises(InvalidInput, match=mentioning("'acme'", "classify", "tag", "--id")):
        pretend(store, "tag", made(tmp_path, "tag", 20, 1))
    reordered = replace(first, id="imported", labels=["c", "a", "b"])
    store.save_tenant(reordered, *store.tenant_weights(first), {"imported": {}})
    assert pretend(store, "classify", file("cab"), tenant="imported").labels == ["c", "a", "b"]


def test_new_labels_come_behind_those_of_the_version_before(store, tmp_path):
    """Rows of older labels stay, whichever version is trained on; the same call changes nothing."""

    def file(name, labels):
        return write(tmp_path / f"{name}.jsonl", [{"text": f"{name} {i}", "label": one} for i, one in enumerate(labels * 10)])

    def rows(version):
        return store.tenant_weights(store.tenant_version("acme", version))[1]

    add = partial(pretend, store, "classify", new_labels=True)
    first, more = add(file("first", "ca")), file("more", "cbd")
    assert first.labels == ["a", "c"], "a first version has no labels before"
    with nothing_looked_up(), pytest.raises(InvalidInput) as refusal:
        pretend(store, "classify", more)
    assert mentions(str(refusal.value), f"{more}:2", "'b'", "'acme'", 1, "--new-labels", "--id", "a, c")
    second = add(more)
    assert second.labels == ["a", "c", "b", "d"] and add(more, trainer=unexpected) == second
    old, new = rows(1), rows(2)  # `untrained` moves the biases
    assert torch.equal(new["weight"][:2], old["weight"])
    assert new["bias"].tolist() == pytest.approx([2 * RATE] * 2 + [2 * RATE - 4] * 2, abs=5e-3)
    assert torch.allclose(new["weight"][2:].float(), old["weight"].float().mean(0).expand(2, -1), atol=1e-3)
    assert mentions(store.report(second)["warnings"], "no examples of a:")
    again = pretend(store, "classify", more, seed=5)  # a version that had them needs no option
    assert again.labels == second.labels and store.report(again)["from_version"] == 1
    fresh = add(file("fresh", "eabcd"), from_version=ANEW)
    assert fresh.labels == ["a", "c", "b", "d", "e"] and torch.unique(rows(4)["weight"], dim=0).shape == rows(4)["weight"].shape
    for labels, options, named in [
        ("abcdef", {"new_labels": False}, ["'f'", "--new-labels"]),
        ("bcdef", {"from_version": ANEW}, ["'a'", 4, "--id"]),
        ([f"{i:04}" for i in range(4096)], {}, ["4,101", "4,096"]),
    ]:
        with nothing_looked_up(), pytest.raises(InvalidInput, match=mentioning(*named)):
            add(file("wrong", labels), **options)
    with pytest.raises(InvalidInput, match=mentioning("dev.jsonl:1", "'g'")):
        add(file("right", "abf"), file("dev", "g"))


@pytest.mark.parametrize("task", ["span", "regress"])
def test_a_task_with_fixed_labels_has_no_new_ones(store, tmp_path, capsys, task):
    train = made(tmp_path, task, 20, 1)
    with pytest.raises(InvalidInput, match=mentioning("--new-labels", "classify", "tag", task)):
        pretend(store, task, train, new_labels=True)
    command = ["build", "tenant", "--store", store.folder, "--id", "acme", "--task", task, "--train", train, "--new-labels"]
    assert mentions(refused(capsys, *command), "--new-labels", task) and store.tenants() == []


def test_an_import_does_not_end_an_interrupted_training(store, tmp_path, capsys):
    """It takes the version number, and the training goes on under the next one."""
    give = partial(pretend, store, "classify", made(tmp_path, "classify", 20, 1))
    other = give(tenant="other")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            give(trainer=interrupted)
        if store.tenant("acme") is None:
            (left := store.tenant_work_folder("acme") / "training" / "kept").write_text("a savepoint")
            store.save_tenant(replace(other, id="acme"), *store.tenant_weights(other), {"task": "classify", "imported": {}})
    assert "acme" not in capsys.readouterr().err
    with pytest.raises(InvalidInput, match=mentioning("'acme'", left.parent)):
        delete_tenant(store, "acme")
    with pytest.raises(InvalidInput):
        give(rank=-1)
    assert left.exists() and give().version == 2 and "dev" in store.report(store.tenant("acme"))


def test_exits_and_students_do_not_end_an_interrupted_training(store, tmp_path):
    """Their savepoints lie beside its own, and are gone once they are made."""
    first, train = (made(tmp_path, "classify", count, count) for count in (40, 20))
    pretend(store, "classify", first)
    with pytest.raises(KeyboardInterrupt):
        pretend(store, "classify", train, trainer=interrupted)
    (left := store.tenant_work_folder("acme") / "training" / "learning.pt").touch()
    with by_one_step():
        build_exits(store, "acme", made(tmp_path, "classify", 150, 3), resolve_precision("fp32", DEVICE), DEVICE)
        build_students(store, "acme", StudentOptions(1, 1, rank=2, epochs=1, learning_rate=0.1), DEVICE)
    assert {path.name for path in left.parent.parent.rglob("*")} == {"training", "plan.json", left.name}
    assert pretend(store, "classify", train).version == 4 and not left.parent.parent.exists()


def test_a_training_that_is_done_does_not_end_interrupted_students(store, tmp_path):
    """Such as in a script that begins again at its first line."""
    train, working = made(tmp_path, "classify", 40, 1), store.tenant_work_folder("acme")
    pretend(store, "classify", train)
    with by_one_step():
        cut(store, build_students, "acme", StudentOptions(1, 1, rank=2, epochs=1, learning_rate=0.1), DEVICE, at="save_next")
    left = {path.name for path in working.glob("*/*")}
    assert pretend(store, "classify", train, trainer=unexpected).version == 1
    assert {path.name for path in working.glob("*/*")} == left > {"plan.json"}


@pytest.mark.parametrize("change_of", ["seed", "table"])
def test_other_options_or_a_new_table_start_an_interrupted_training_anew(store, tmp_path, capsys, change_of):
    give = partial(pretend, store, "classify", made(tmp_path, "classify", 20, 1), tenant="cut", trainer=interrupted)
    with pytest.raises(KeyboardInterrupt):
        give()
    (left := store.tenant_work_folder("cut") / "training" / "learning.pt").touch()
    if change_of == "table":
        give_other_values(store, "root", 1)
    with pytest.raises(KeyboardInterrupt):
        give(seed=7 if change_of == "seed" else 0)
    assert not left.exists() and mentions(capsys.readouterr().err, "cut")


def test_a_tenant_is_trained_by_one_process_at_a_time_on_a_table_that_stays(store, tmp_path):
    train = made(tmp_path, "classify", 20, 1)
    with locked_folder(store.tenant_work_folder("acme"), "the other's"), pytest.raises(InvalidInput, match="'acme'"):
        pretend(store, "classify", train)

    def deleted(*given):
        found = untrained(*given)
        store.remove_branch("root", 1)
        return found

    with pytest.raises(InvalidInput, match=mentioning(store.table_folder("root", 1))):
        pretend(store, "classify", train, trainer=deleted)
    assert store.tenants() == []


def test_a_deleted_tenant_leaves_nothing_behind(store, tmp_path, capsys):
    for seed, tenant in ((1, "acme"), (2, "acme"), (1, "other")):
        pretend(store, "classify", made(tmp_path, "classify", 20, seed), tenant=tenant)
    command = ["tenant", "delete", "acme", "--store", store.folder]
    assert mentions(refused(capsys, *command, "--state", tmp_path), "--store", "--state")
    assert run(capsys, *command) == {"tenant": "acme", "removed": [1, 2]}
    assert [tenant.id for tenant in store.tenants()] == ["other"] and not list(store.folder.rglob("*acme*"))
    assert mentions(refused(capsys, *command), "'acme'", "other")


def test_the_same_command_with_an_upper_rate_trains_nothing_again(store, tmp_path):
    """Its adapter works on all projections, which the version says and the command does not."""
    again = partial(pretend, store, "classify", made(tmp_path, "classify", 20, 0), adapter="lora", body_rate=1e-4)
    again()
    assert again(trainer=unexpected).version == 1
