"""Builds and trainings that are killed at a change of the disk, and go on, end the same.

Each case takes seconds, because each kill forks. Builds train in one step.
"""

import shutil

import pytest

from builder.exits.build import build_exits
from builder.importing.plain import save_checkpoint
from builder.learning.bodies import PlotBody
from builder.learning.limits import Budget
from builder.store import resumable
from builder.store.pack import pack_root, unpack_root
from builder.store.store import Store, TenantVersion
from builder.students.build import build_students
from builder.students.options import StudentOptions
from builder.tables import sorted_runs
from builder.tables.corpus import tokenize_corpus
from builder.tables.counts import count_ngrams
from builder.tables.domain import UpdateOptions, build_domain, update_domain
from builder.tables.root import RootOptions, build_root
from builder.tasks.lookup import Reader
from builder.training.build import delete_tenant
from builder.training.data import read_data
from builder.training.finetuning import TrainingOptions, finetune
from builder.training.start import ANEW
from hplm.cli.main import main
from hplm.engine.engine import resolve_precision
from hplm.model.windows import Window
from hplm.plot.keys import KeySpace
from hplm.tenants.embedding import Embedding
from testing.random_store import random_tenant
from tests.builder.checkpoints import SIZES, same, save_base, save_bert, save_tokenizer
from tests.builder.importing import stores as imports
from tests.builder.importing.stores import LABELS
from tests.builder.stores import NO_TIME, SMALL, add_tenant, corpus, rooted, some_lines
from tests.builder.tables.test_counting import MANY_RUNS, corpus_of, some_documents
from tests.builder.training.small_tenants import CUT, made, pretend, write
from tests.support.device import DEVICE
from tests.support.killed import changes, deaths_survived, killed
from tests.support.learning import by_one_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

VECTORS = Embedding(SIZES["hidden_size"], shortens=True)
STUDENTS = StudentOptions(2, 2, rank=2, epochs=1, learning_rate=0.1)


def copied(store, folder):
    """Returns the store that a build changes: a copy of a ready one, or what a killed call has left."""
    return Store(folder if folder.exists() else shutil.copytree(store.folder, folder))


def tokenised(folder, given):
    store, texts = rooted(folder / "ready"), [corpus(folder, seed, lines=1500) for seed in (1, 2)]  # three batches
    return lambda target: tokenize_corpus(texts, store.tokenizer(), target)


def counted(folder, given):
    """Of more runs than are merged at once."""
    given("monkeypatch").setattr(sorted_runs, "WIDTH", 2)
    found, space = corpus_of(folder / "corpus", some_documents()), KeySpace(250_000, Window(5, causal=True))
    return lambda target: count_ngrams(found, space, target, MANY_RUNS)


def domain(folder, given):
    ready, texts = rooted(folder / "ready"), [corpus(folder, seed) for seed in (1, 2)]

    def work(target):
        """Runs the unfinished steps again, as a user would after an interruption."""
        store = copied(ready, target)
        if ("bio", 1) not in store.domains() or store.work_folder("bio", 1).exists():
            build_domain(store, "bio", texts[:1], SMALL, NO_TIME, DEVICE)
        update_domain(store, "bio", texts[1:], UpdateOptions(dtype="int8"), NO_TIME, DEVICE)

    return work


def root(folder, given):
    model, text = str(save_bert(folder)), corpus(folder, 1, lines=10)
    given("no_pictures")
    options, budget = RootOptions(name="tiny", window=Window(2, causal=True), keep=0.5, masked=0.5), Budget(steps=10)

    def work(target):
        store, table = build_root(model, [text], target, options, budget, DEVICE)
        assert table.meta.causal and store.config.window == Window(2, causal=True)
        (target / "lower/root-1.json").write_text("")  # it contains the time that it took

    return work


def tenant(folder, given):
    """Its second version, which starts anew: once it is stored, the same command must not make a third."""
    ready, train = copied(given("learnable"), folder / "ready"), made(folder, "classify", 20, 1)
    pretend(ready, "classify", train)
    given("no_pictures")
    return lambda target: pretend(copied(ready, target), "classify", train, from_version=ANEW)


def tenants(folder, given):
    """`hplm build tenants` of two at once, which are so in one process, as in `anew`."""
    ready, train = copied(given("learnable"), folder / "ready"), made(folder, "classify", 20, 1)
    lines = ({"id": name, "task": "classify", "train": train.name, "rank": 2, "epochs": 1} for name in ("acme", "beta"))
    file = write(folder / "tenants.jsonl", lines)
    given("no_pictures")
    given("in_this_process")

    def work(target):
        copied(ready, target)
        assert main(["build", "tenants", str(file), "--at-once", "2", "--device", str(DEVICE), "--store", str(target)]) == 0
        without_times(target)

    return work


def students(folder, given):
    ready, train = copied(given("learnable"), folder / "ready"), made(folder, "classify", 40, 1)
    pretend(ready, "classify", train)
    more = corpus(folder, 3, lines=60)
    return lambda target: build_students(copied(ready, target), "acme", STUDENTS, DEVICE, unlabelled=more)


def exits(folder, given):
    """The next version of a tenant, as a calibration makes one too."""
    ready, texts = given("tasks").store, write(folder / "texts.jsonl", ({"text": line} for line in some_lines(120, 1)))
    precision = resolve_precision("fp32", DEVICE)
    return lambda target: build_exits(copied(ready, target), "pair", texts, precision, DEVICE)


def without_times(store):
    """Empties what says how long something has taken."""
    timed = ("tenants/*/*/report.*", "lower/root-1.json", "imports.html")
    for path in (path for pattern in timed for path in store.glob(pattern)):
        path.write_text("")


def anew(folder, given):
    """`hplm import --root` of two at once. They are so in one process: a kill is at a change of the disk by any of them."""
    save_base(folder / "base")
    save_tokenizer(folder / "base", SIZES["vocab_size"])
    imports.tuned(folder / "models/one")
    imports.embedding(folder / "models/two")
    given("no_pictures")
    given("in_this_process")
    options = f"--root {folder}/base --from {folder}/models --at-once 2 --texts {imports.texts(folder, 60)}"
    command = f"import {options} --rank 2 --epochs 1 --least 0 --device {DEVICE} --store"

    def work(target):
        assert main([*command.split(), str(target)]) == 0
        without_times(target)

    return work


def exported(folder, given):
    """A tenant as a checkpoint."""
    ready = copied(Store(given("imported")), folder / "ready")
    random_tenant(ready, TenantVersion("acme", 1, "root", 1, "tag", LABELS, 4, "lora"), 0.3, seed=1)
    return lambda target: save_checkpoint(ready, "acme", target / "acme", None, DEVICE)


def deleted(folder, given):
    """A tenant, which a user makes and deletes again after an interruption."""
    ready = rooted(folder / "ready")

    def work(target):
        store = copied(ready, target)
        if store.tenant("acme") is None:
            add_tenant(store, "acme", "root")
        delete_tenant(store, "acme")

    return work


def unpacked(folder, given):
    pack_root(rooted(folder / "ready"), folder / "root.tar")

    def work(target):
        if not (target / "store.json").exists() or any(target.glob("unpacked*")):
            unpack_root(folder / "root.tar", target)

    return work


BUILDS = {
    tokenised: 4, counted: 50, domain: 20, root: 13, tenant: 3, tenants: 6, exits: 6, students: 6,
    anew: 50, exported: 1, deleted: 5, unpacked: 5,
}  # fmt: skip


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)
def test_a_killed_build_ends_with_the_same_bytes(tmp_path, monkeypatch, request, build):
    """`BUILDS` says how many changes of the disk there are at least."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # the test forks
    with by_one_step():
        work = build(tmp_path, request.getfixturevalue)
        assert deaths_survived(work, tmp_path) >= BUILDS[build]


@pytest.fixture(scope="module")
def original(bert, tmp_path_factory):
    """A store with a root of a saved BERT."""
    folder = tmp_path_factory.mktemp("original")
    texts = [corpus(folder, 1, lines=60)]
    return build_root(str(bert), texts, folder / "store", RootOptions(name="tiny"), NO_TIME, DEVICE)[0]


@pytest.mark.parametrize(
    ("task", "name", "count", "embedding"), [("classify", "classify", 80, None), ("embed", "near", 400, VECTORS)]
)
def test_a_training_that_goes_on_from_a_savepoint_ends_with_the_same_numbers(
    original, tmp_path, monkeypatch, task, name, count, embedding
):
    """A tenant with all weights and random numbers that a training has: its adapter is cut.

    Trainings of one step (`tests/support/learning.py`) say of all others that they would have the same batches.
    """
    file, ends = made(tmp_path, name, count, 1), []

    def train(folder):
        data = read_data(Reader(original, "root", 1), task, file, None, DEVICE, embedding=embedding)
        options = TrainingOptions(rank=8, epochs=2, embedding=embedding, **CUT)
        found = finetune(PlotBody.of(original), data, options, folder / "learning.pt")
        adapter, head = found.model.stored()
        learned = {f"{i}.{name}": part for i, layer in enumerate([*adapter, head]) for name, part in layer.items()}
        found.report["seconds"] = 0
        ends.append((learned, found.report, found.scores))

    monkeypatch.setattr(resumable, "SECONDS_BETWEEN", 0.0)
    count = changes(train, tmp_path / "whole")
    killed(train, tmp_path / "killed", at=2 * count // 3)
    assert changes(train, tmp_path / "killed") < count // 2, "it did not go on from its savepoint"
    (learned, *reported), (found, *again) = ends
    assert same(found, learned) and again == reported
