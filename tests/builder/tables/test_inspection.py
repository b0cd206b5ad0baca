"""The predictions of an inspection for other table sizes equal the figures of tables of these sizes."""

import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

from builder.store.store import TenantFile
from builder.tables.coverage import cover
from builder.tables.coverage_picture import draw
from builder.tables.domain import DomainOptions, UpdateOptions, build_domain, update_domain
from builder.tables.inspection import behind, frequent
from builder.tables.table import table_bytes
from hplm.errors import InvalidInput
from hplm.model.windows import Window
from hplm.plot.forest import Forest, assign_addresses
from hplm.plot.levels import count_levels, ends
from hplm.plot.writing import write_table
from testing.random_store import random_values
from tests.builder.tables.branches import CPU, build, some_lines
from tests.builder.tables.test_domain import NO_TIME, SMALL, corpus, rooted, tenant, with_bio
from tests.support.message import mentioning, mentions

KEEPS = [1.0, 0.5, 0.1, 0.02, 0.0]
WINDOWS = [Window(3), Window(2, causal=True), Window(5), Window(1)]


def looked_up(store, chain, text):
    documents = store.tokenizer().encode_documents(text.read_text("utf-8").splitlines())
    return chain.lookup(np.concatenate(documents), np.array([len(document) for document in documents]))


def shares(store, chain, text):
    """Returns the shares (here, above, shorter by name) of the lookups of a served text."""
    hits = looked_up(store, chain, text)
    tokens = chain.space.window.levels().sum(1).tolist()
    own = ((hits.levels == 0) & (hits.links == 0)).mean()
    above = ((hits.levels == 0) & (hits.links > 0)).mean()
    return own, above, {f"{count}-gram": (hits.levels == level).mean() for level, count in enumerate(tokens) if level}


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_predicted_coverage_equals_that_of_tables_built_with_this_keep(tmp_path, window):
    store = rooted(tmp_path, window)
    options = [("parent", DomainOptions(min_tokens=1, keep=0.3)), ("bio", replace(SMALL, parent="parent"))]
    for seed, (name, how) in enumerate(options, start=1):
        build_domain(store, name, [corpus(tmp_path, seed)], how, NO_TIME, CPU)
    text = corpus(tmp_path, 7)
    text.write_text("\n".join([*some_lines(10, 2), *some_lines(10, 1), *some_lines(30, 9)]), "utf-8")
    coverage = cover(store, "bio", 1, text, KEEPS)
    assert not coverage.cut
    for number, (keep, kept) in enumerate(zip(KEEPS, coverage.kept, strict=True)):
        how = replace(SMALL, parent="parent", keep=keep)
        table = build_domain(store, f"kept-{number}", [corpus(tmp_path, 2)], how, NO_TIME, CPU)
        own, above, shorter = shares(store, store.forest(f"kept-{number}", 1).chain(f"kept-{number}", 1), text)
        assert kept.ngrams == table.meta.keys
        assert abs(kept.fp16_bytes - sum(table.meta.sizes().values())) < 400
        assert (kept.here, kept.above) == pytest.approx((own, above)) and kept.shorter == pytest.approx(shorter)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_root_keeps_its_tokens_at_every_size(tmp_path, window):
    store = rooted(tmp_path, window)
    text = corpus(tmp_path, 7)
    coverage = cover(store, "root", 1, text, KEEPS)
    for number, (keep, kept) in enumerate(zip(KEEPS, coverage.kept, strict=True)):
        table, _, _ = build(store, tmp_path, f"kept-{number}", some_lines(20, seed=0), keep=keep)
        chain = Forest([store.folder / "plot"], assign_addresses([table])).chain(f"kept-{number}", 1)
        own, above, shorter = shares(store, chain, text)
        assert kept.ngrams == table.meta.keys and above == kept.above == 0
        assert kept.here == pytest.approx(own) and kept.shorter == pytest.approx(shorter)


@pytest.mark.parametrize("name", ["bio", "root"])
def test_a_table_with_rows_in_another_order_predicts_the_same(tmp_path, name):
    """Tables of earlier versions have their rows in the order of counts, all lengths together."""
    store = with_bio(tmp_path)
    text = corpus(tmp_path, 7)
    expected = cover(store, name, 1, text, KEEPS)
    table = store.table(name, 1)
    keys = np.random.default_rng(0).permutation(table.index.by_row())
    shutil.rmtree(table.folder)
    write_table(
        table.folder, store.table_spec(name, 1, table.meta.parent_branch, "fp16", 1), keys, random_values(table.meta, 0)
    )
    assert cover(store, name, 1, text, KEEPS) == expected


@pytest.mark.parametrize("keep", [0.3, 0.05, 0.0])
def test_a_cut_table_predicts_its_own_coverage_and_that_of_smaller_ones(tmp_path, keep):
    store = rooted(tmp_path, keep=keep)
    text = corpus(tmp_path, 7)
    coverage = cover(store, "root", 1, text, [keep])
    assert coverage.kept[0].ngrams == store.meta("root", 1).keys
    chain = store.forest("root", 1).chain("root", 1)
    hits = looked_up(store, chain, text)
    names = count_levels(chain, ends(chain, hits))
    assert coverage.levels == pytest.approx({name: count / coverage.tokens for name, count in names.items()})
    assert coverage.kept[0].here == pytest.approx(coverage.levels["root"])
    assert all(kept.keep <= max(0.004, keep + 0.02) for kept in cover(store, "root", 1, text).kept)
    with pytest.raises(InvalidInput, match=mentioning(0.9, "'root'", "--keep")):
        cover(store, "root", 1, text, [0.9])


def test_a_long_text_is_read_only_in_part(tmp_path):
    store = rooted(tmp_path)
    text = corpus(tmp_path, 7, lines=1200)
    read = []
    coverage = cover(store, "root", 1, text, progress=read.append, most_tokens=5000)
    assert coverage.cut and 5000 <= coverage.tokens < 1200 * 20 and sum(read)


def test_frequent_ngrams_are_shown_as_words_in_the_order_of_rows(tmp_path):
    store = rooted(tmp_path)
    table = store.table("root", 1)
    found = frequent(store, table, 7)
    assert list(found) == ["3-gram", "2-gram", "1-gram"]
    assert {ngram.words for ngram in found["1-gram"]} >= {"[CLS]", "[SEP]", "wa"}
    for ngrams in found.values():
        rows = [ngram.row for ngram in ngrams]
        assert len(rows) == 7 and rows == sorted(rows)
    for ngram in found["3-gram"]:
        assert int(table.find(store.space.pack(np.array([ngram.tokens]) + 1))[0]) == ngram.row


@pytest.mark.parametrize("dtype", ["fp16", "int8"])
def test_sizes_equal_those_of_the_files(tmp_path, dtype):
    store = rooted(tmp_path)
    table = build_domain(store, "bio", [corpus(tmp_path, 1)], replace(SMALL, dtype=dtype), NO_TIME, CPU)
    on_disk = sum(file.stat().st_size for file in table.folder.iterdir() if file.name != "meta.json")
    assert table_bytes(table.meta, table.meta.keys, dtype) == on_disk


def test_tenants_on_an_older_version_are_behind(tmp_path):
    store = with_bio(tmp_path)
    tenant(store, "acme", "bio", 1)
    tenant(store, "elsewhere", "root", 1)
    assert behind(store, "bio") == []
    update_domain(store, "bio", [corpus(tmp_path, 2)], UpdateOptions(), NO_TIME, CPU)
    tenant(store, "fresh", "bio", 2)
    assert [late.id for late in behind(store, "bio")] == ["acme"]
    assert isinstance(behind(store, "bio")[0], TenantFile)


def test_the_picture_shows_the_curve(tmp_path):
    store = with_bio(tmp_path)
    coverage = cover(store, "bio", 1, corpus(tmp_path, 7))
    curve = coverage.curve
    assert curve.bytes == sorted(curve.bytes) and curve.here == sorted(curve.here)
    assert curve.here[-1] == pytest.approx(coverage.levels["domain"])
    draw(coverage, store.meta("bio", 1), "text.txt", tmp_path / "new" / "picture.svg")
    drawn = re.findall(r"<!-- (.*?) -->", (tmp_path / "new" / "picture.svg").read_text("utf-8"))
    assert sum(mentions(text, "3-gram") for text in drawn) >= 2 and any(mentions(text, "2-gram") for text in drawn)
    with pytest.raises(InvalidInput, match=mentioning("--picture", tmp_path / "picture.txt", ".png", ".svg", ".pdf")):
        draw(coverage, store.meta("bio", 1), "text.txt", tmp_path / "picture.txt")
