"""Builds that are killed at a change of the disk and run again end with the same bytes, and leave nothing behind.

Each case takes seconds, because each of its kills forks.
"""

import shutil

import pytest

from builder.evaluation.calibration import calibrate_tenant
from builder.exits.build import build_exits
from builder.importing.lower import NewDomain
from builder.importing.tenant import ImportOptions, import_tenant
from builder.store.pack import pack_root, unpack_root
from builder.store.store import Store
from builder.tables.corpus import tokenize_corpus
from builder.tables.counting import add_counts, count_ngrams
from builder.tables.domain import UpdateOptions, build_domain, update_domain
from builder.tables.root import RootOptions, build_root
from builder.training.start import ANEW
from builder.training.tenant import delete_tenant
from hplm.engine.engine import resolve_precision
from hplm.model.windows import Window
from hplm.plot.keys import KeySpace
from tests.builder.checkpoints import save_bert
from tests.builder.importing.stores import FIXTURES, LABELS
from tests.builder.stores import CPU, NO_TIME, SMALL, add_tenant, corpus, rooted
from tests.builder.tables.test_counting import MANY_RUNS, corpus_of, some_documents
from tests.builder.training.small_tenants import made, pretend
from tests.support.killed import deaths_survived

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def copied(store, folder):
    """Returns the store that a build changes: a copy of a ready one, or what a killed call has left."""
    return Store(folder if folder.exists() else shutil.copytree(store.folder, folder))


def tokenised(folder, given):
    store, texts = rooted(folder / "ready"), [corpus(folder, seed, lines=1500) for seed in (1, 2)]  # three batches
    return lambda target: tokenize_corpus(texts, store.tokenizer(), target, show_progress=False)


def counted(folder, given):
    found, space = corpus_of(folder / "corpus", some_documents()), KeySpace(250_000, Window(5, causal=True))
    return lambda target: count_ngrams(found, space, target, MANY_RUNS, show_progress=False)


def added(folder, given):
    parts = [
        count_ngrams(corpus_of(folder / name, documents), KeySpace(200, Window(3)), folder / f"c-{name}", show_progress=False)
        for name, documents in (("a", some_documents()), ("b", some_documents()[::2]))
    ]
    return lambda target: add_counts(parts, target, MANY_RUNS, show_progress=False)


def domain(folder, given):
    ready, texts = rooted(folder / "ready"), [corpus(folder, seed) for seed in (1, 2)]

    def work(target):
        """Runs the unfinished steps again, as a user would after an interruption."""
        store = copied(ready, target)
        if ("bio", 1) not in store.domains() or store.work_folder("bio", 1).exists():
            build_domain(store, "bio", texts[:1], SMALL, NO_TIME, CPU)
        update_domain(store, "bio", texts[1:], UpdateOptions(dtype="int8"), NO_TIME, CPU)

    return work


def root(folder, given):
    model, text = str(save_bert(folder)), corpus(folder, 1, lines=10)
    options = RootOptions(name="tiny", window=Window(2, causal=True), keep=0.5)

    def work(target):
        store, table = build_root(model, [text], target, options, NO_TIME, CPU)
        assert table.meta.causal and store.config.window == Window(2, causal=True)
        for name in ("root-1.json", "root-1.html"):
            (target / "lower" / name).write_text("")  # it contains the time that it took

    return work


def tenant(folder, given):
    """Its second version, which starts anew: once it is stored, the same command must not make a third."""
    ready, train = copied(given("learnable"), folder / "ready"), made(folder, "classify", 20, 1)
    pretend(ready, "classify", train)
    given("no_pictures")
    return lambda target: pretend(copied(ready, target), "classify", train, from_version=ANEW)


def exits(folder, given):
    """Whose tenant is calibrated first: both make a version."""
    ready = copied(given("learnable"), folder / "ready")
    train, texts = (made(folder, "classify", 120, seed) for seed in (1, 2))
    pretend(ready, "classify", train)
    precision = resolve_precision("fp32", CPU)

    def work(target):
        store = copied(ready, target)
        if "exits" not in store.report(store.tenant("acme")):
            calibrate_tenant(store, "acme", texts, precision, CPU, show_progress=False)
        build_exits(store, "acme", texts, precision, CPU, show_progress=False)

    return work


def imported(folder, given):
    ready, text = Store(given("imported")), corpus(folder, 1)
    options = ImportOptions(labels=LABELS, new_domain=NewDomain("low", [text], min_tokens=1))
    lower = FIXTURES / "peft-lower"
    return lambda target: import_tenant(copied(ready, target), "acme", lower, options, CPU, show_progress=False)


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
        if not (target / "store.json").exists() or (target / "unpacked").exists():
            unpack_root(folder / "root.tar", target)

    return work


BUILDS = {
    tokenised: 6, counted: 50, added: 10, domain: 20, root: 10, tenant: 3, exits: 3, imported: 20, deleted: 5, unpacked: 5
}  # fmt: skip


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)
def test_a_killed_build_ends_with_the_same_bytes(tmp_path, monkeypatch, request, build):
    """`BUILDS` says how many changes of the disk there are at least."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # the test forks
    assert deaths_survived(build(tmp_path, request.getfixturevalue), tmp_path) >= BUILDS[build]
