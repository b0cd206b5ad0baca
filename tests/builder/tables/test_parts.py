"""Parts of a corpus that machines have counted give the tables of a corpus that was counted at once."""

from dataclasses import replace

import pytest

from builder.part import Part
from builder.tables.domain import UpdateOptions, build_domain, update_domain
from builder.tables.parts import NgramSettings, count_part, read_parts
from builder.tables.root import RootOptions, build_root
from builder.tables.table import TableOptions
from hplm.errors import InvalidInput
from hplm.model.windows import Window
from tests.builder.checkpoints import save_bert
from tests.builder.stores import NO_TIME, SMALL, corpus, rooted
from tests.cli.commands import printed, refused
from tests.support.device import DEVICE
from tests.support.killed import content
from tests.support.message import mentioning, mentions

pytestmark = pytest.mark.slow


@pytest.fixture
def texts(tmp_path):
    """Four files."""
    return [corpus(tmp_path, seed, lines=10 * seed) for seed in (1, 2, 3, 4)]


def test_parts_give_the_tables_of_a_corpus_that_was_counted_at_once(tmp_path, texts, capsys):
    store, files = rooted(tmp_path), ["--corpus", *texts]
    parts = [tmp_path / f"part-{number}" for number in (1, 2, 3)]
    for number, part in enumerate(parts, start=1):
        for _ in range(2):  # the second call changes nothing
            said = printed(capsys, "build", "counts", *files, "--store", store.folder, "--to", part, "--part", f"{number}/3")
        assert mentions(said, part, "--counts") and not (part / "corpus").exists()
    given = replace(SMALL, counts=[str(part) for part in parts])
    added = build_domain(store, "added", texts[:1], given, NO_TIME, DEVICE)
    whole = build_domain(store, "whole", texts, SMALL, NO_TIME, DEVICE)
    folders = [store.counts_folder(name, 1) for name in ("added", "whole")]
    for tables in (folders, [added.folder, whole.folder]):
        one, other = ({name: data for name, data in content(folder).items() if ".json" not in name} for folder in tables)
        assert one == other
    assert build_domain(store, "added", texts[:1], given, NO_TIME, DEVICE).meta == added.meta  # it is there
    grown = [
        update_domain(store, "added", texts[:1], UpdateOptions(counts=given.counts), NO_TIME, DEVICE),
        update_domain(store, "whole", texts, UpdateOptions(), NO_TIME, DEVICE),
    ]
    assert grown[0].meta.corpus_tokens == grown[1].meta.corpus_tokens == 2 * whole.meta.corpus_tokens


def test_a_root_takes_counts_of_its_model(tmp_path, texts, capsys):
    model, window = str(save_bert(tmp_path)), Window(2)
    printed(capsys, "build", "counts", "--corpus", *texts, "--model", model, "--window", 2, "--to", tmp_path / "counts")
    options = RootOptions(name="tiny", window=window, counts=[str(tmp_path / "counts")])
    _, added = build_root(model, texts, tmp_path / "added", options, NO_TIME, DEVICE)
    _, whole = build_root(model, texts, tmp_path / "whole", RootOptions(name="tiny", window=window), NO_TIME, DEVICE)
    assert content(added.folder) == content(whole.folder)
    with pytest.raises(InvalidInput, match=mentioning(tmp_path / "counts")):  # of another window
        read_parts([tmp_path / "counts"], NgramSettings.of(rooted(tmp_path)))


def test_counts_that_are_no_whole_or_of_something_else_are_refused(tmp_path, texts, capsys):
    store = rooted(tmp_path)
    reading, first = NgramSettings.of(store), tmp_path / "first"
    count_part(texts, Part(1, 3), reading, first)
    with pytest.raises(InvalidInput, match=mentioning("2, 3", "--counts")):
        build_domain(store, "bio", texts, replace(SMALL, counts=[str(first)]), NO_TIME, DEVICE)
    assert not store.work_folder("bio", 1).exists()
    with pytest.raises(InvalidInput, match=mentioning(first, "--to")):
        count_part(texts, Part(2, 3), reading, first)
    with pytest.raises(InvalidInput, match=mentioning(first)):
        read_parts([first], replace(reading, tokenizer_json="{}"))
    with pytest.raises(InvalidInput, match=mentioning("--part 1/5", 4)):
        count_part(texts, Part(1, 5), reading, tmp_path / "many")
    with pytest.raises(InvalidInput, match=mentioning(tmp_path / "none")):
        build_domain(store, "bio", texts, replace(SMALL, counts=[str(tmp_path / "none")]), NO_TIME, DEVICE)
    counting = "build", "counts", "--corpus", texts[0], "--to", tmp_path / "other"
    for given, named in (((), "--model"), (("--store", store.folder, "--window", 2), "--window")):
        assert mentions(refused(capsys, *counting, *given), named)


def test_a_plan_without_counts_is_as_in_the_release_before():
    assert "counts" not in TableOptions().planned() and TableOptions(counts=["/a"]).planned()["counts"] == ["/a"]
