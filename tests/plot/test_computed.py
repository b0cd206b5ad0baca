"""Rows that are computed because no table has them: as a table would store them, kept within bounds, and each domain's own."""

import gc

import numpy as np
import pytest
import torch

from builder.store.branches import table_spec
from hplm.plot.computed import ComputedRows
from hplm.plot.forest import Chain, Forest, assign_addresses
from hplm.plot.gathering import Gatherer
from hplm.plot.writing import write_table
from testing.random_store import random_backbone
from testing.toy import CHAT
from tests.support.device import DEVICE

CPU = torch.device("cpu")
TEXTS = np.random.default_rng(0).integers(0, CHAT.vocabulary, (6, 20))


def lower_of(seed):
    lower = random_backbone(CHAT, seed)[0].eval()
    with torch.no_grad():
        for weight in lower.parameters():
            weight.mul_(10 if weight.ndim > 1 else 1)
    return lower.to(DEVICE)


@pytest.fixture
def table_of(tmp_path):
    def make(name, dtype="fp16", keys=(), seed=0):
        """Returns the chain of a table with all tokens, and with these windows, by the lower layers of this seed."""
        spec, lower = table_spec(CHAT, name, 1, None, dtype, 0), lower_of(seed).cpu()
        keys = np.unique(np.concatenate([spec.space.unigrams(), *keys]), axis=0)
        with torch.no_grad():
            table = write_table(tmp_path / name / "1", spec, keys, lambda windows: lower(torch.from_numpy(windows)))
        return Chain([(table, 0)])

    return make


def computed_rows(lowers, rows=1000):
    return ComputedRows(CHAT, DEVICE, torch.float32, lambda table: lowers[table.meta.domain], rows * CHAT.hidden * 4)


def filled(computed, *asked):
    """Returns the rows of texts' tokens, of which no table has any. `asked`: chains and texts."""
    texts = [text for _, text in asked]
    keys = asked[0][0].space.of(np.concatenate(texts), np.array([len(text) for text in texts]))
    sums = torch.zeros(len(keys), CHAT.hidden, device=DEVICE)
    computed.fill(sums, np.zeros(len(keys), dtype=np.int64), keys, [(chain.domain, len(text)) for chain, text in asked])
    return sums.cpu()


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "int8"])
def test_a_computed_row_is_the_one_that_the_table_would_store(table_of, tmp_path, dtype):
    lengths = np.full(len(TEXTS), len(TEXTS[0]))
    keys = table_of("any").space.of(TEXTS.ravel(), lengths)
    some, all_of_them = table_of("some", dtype, [keys[::2]]), table_of("all", dtype, [keys])
    forest = Forest([tmp_path], assign_addresses([all_of_them.domain]))
    stored = Gatherer(CPU, torch.float32).sums(forest, all_of_them.lookup(TEXTS.ravel(), lengths).addresses, lengths)

    hits = some.lookup(TEXTS.ravel(), lengths)
    assert 20 < np.count_nonzero(hits.whole == 0) < len(keys) - 20 and not hits.whole[hits.levels > 0].any()
    forest = Forest([tmp_path], assign_addresses([some.domain]))
    sums = Gatherer(DEVICE, torch.float32).sums(forest, hits.whole, lengths)
    computed_rows({"some": lower_of(0)}).fill(sums, hits.whole, keys, [(some.domain, 20)] * len(TEXTS))
    assert (sums.cpu() == stored).float().mean() > 0.95, "but for what rounding turns to its other side"
    torch.testing.assert_close(sums.cpu(), stored, rtol=1e-2, atol=float(stored.abs().max()) / 100)


def test_neighbours_do_not_change_a_row(table_of):
    chain, lowers = table_of("root"), {"root": lower_of(0)}
    alone = torch.cat([filled(computed_rows(lowers), (chain, text)) for text in TEXTS])
    together = filled(computed_rows(lowers), *((chain, text) for text in TEXTS))
    torch.testing.assert_close(alone, together, rtol=2e-3, atol=1e-5)


def test_what_was_used_last_is_kept_and_no_more_than_has_room(table_of):
    chain, computed = table_of("root"), computed_rows({"root": lower_of(0)}, rows=4)

    def asked(*tokens):
        """Asks for texts of one token, and returns how many were computed."""
        before = computed.computed
        rows = filled(computed, *((chain, np.array([token])) for token in tokens))
        expected = filled(computed_rows({"root": lower_of(0)}), *((chain, np.array([token])) for token in tokens))
        torch.testing.assert_close(rows, expected, rtol=2e-3, atol=1e-5)
        assert len(computed._places) <= 4 == len(computed._kept)
        return computed.computed - before

    assert [asked(1, 2, 3, 1), asked(1), asked(4, 5)] == [3, 0, 2]
    assert [asked(1, 3, 4, 5), asked(2)] == [0, 1], "2 was not used for the longest time"
    assert asked(*range(10, 30), 10) == 20, "a step may have more than are kept"
    assert computed.found == 7


def test_each_domain_and_version_has_rows_of_its_own(table_of):
    lowers = {"root": lower_of(0), "law": lower_of(1)}
    root, law, computed, text = table_of("root"), table_of("law"), computed_rows(lowers), TEXTS[0]
    both = filled(computed, (root, text), (law, text), (root, text))
    assert computed.computed == 2 * len(text), "equal windows of a step are computed once"
    torch.testing.assert_close(both[:20], filled(computed_rows(lowers), (root, text)), rtol=2e-3, atol=1e-5)
    torch.testing.assert_close(both[20:40], filled(computed_rows(lowers), (law, text)), rtol=2e-3, atol=1e-5)
    assert torch.equal(both[40:], both[:20]) and not torch.allclose(both[:20], both[20:40], rtol=0.1)

    del law
    gc.collect()
    lowers["law"] = lower_of(2)
    newer = table_of("newer", seed=2)
    newer.domain.meta.__dict__["domain"] = "law"  # its next version
    assert torch.equal(filled(computed, (newer, text)), filled(computed_rows(lowers), (newer, text)))
    assert computed.computed == 3 * len(text)
