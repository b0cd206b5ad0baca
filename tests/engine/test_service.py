"""The whole upper half without a server: mixed traffic equals the reference, and every request gets exactly one answer."""

import gc
import random
import shutil
import time
import weakref
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from hplm.engine.backbone import Backbone
from hplm.engine.engine import Engine
from hplm.engine.overlap import OVERLAPS
from hplm.engine.packing import PACKINGS, Concat, Slotted
from hplm.engine.staging import Stager
from hplm.engine.views import Watch
from hplm.errors import Broken, DeadlineMissed, InvalidInput
from hplm.model.windows import Window
from hplm.plot import rows as rows_module
from hplm.plot.gathering import Gatherer
from hplm.plot.table import Table
from hplm.scheduling.policy import OURS
from hplm.scheduling.queue import Queue
from testing.random_store import SPECIAL
from testing.reference import Reference
from testing.toy import CONFIG, TENANTS, WORDS, Toy, make_toy, random_text
from tests.engine.asker import Asker
from tests.equality import Comparison
from tests.naming import names, naming
from tests.waiting import eventually

pytestmark = pytest.mark.slow


@pytest.fixture
def asker(toy):
    asker = Asker(toy.folder)
    yield asker
    asker.close()


@pytest.fixture(scope="module")
def expected(reference):
    return cache(lambda tenant, text: reference.forward(text, tenant).numpy())


@pytest.fixture(scope="module")
def expected_in_eight_bits(toy):
    reference = Reference.open(toy.folder, eight_bits=True)
    return cache(lambda tenant, text: reference.forward(text, tenant).numpy())


@pytest.mark.parametrize(
    "chosen",
    [
        {"dtype": "fp32"},
        {"dtype": "bf16"},
        {"packing": "turbo", "policy": "das", "admission": "false"},
        {"packing": "slotted:rows=3,length=40", "commit_ms": "0.5", "policy": "slotted_das"},
        {"packing": "slotted", "policy": "slotted_das:rows=4"},
        {"packing": "concat", "policy": "das:row_tokens=50"},
        *({"overlap": overlap} for overlap in OVERLAPS if overlap != "pipelined"),
    ],
    ids=lambda chosen: " ".join(chosen.values()),
)
def test_mixed_traffic_equals_the_reference(toy, expected, chosen):
    """More tenants than half the slots, both tasks, two ranks, two head sizes, one to sixty words, one to five texts."""
    asker, rng = Asker(toy.folder, **chosen), random.Random(1)
    asked = []
    for _ in range(120):
        tenant = rng.choice(TENANTS).id
        texts = [random_text(rng) for _ in range(rng.choice([1, 1, 1, 5]))]
        asked.append((tenant, texts, asker.ask(tenant, texts)))
    comparison = Comparison()
    for tenant, texts, number in asked:
        for text, rows in zip(texts, asker.wait(number), strict=True):
            comparison.add(tenant, rows.logits, expected(tenant, text))
    comparison.assert_equal(chosen.get("dtype", "fp32"))
    asker.close()


def test_mixed_traffic_in_eight_bits_equals_the_reference_in_eight_bits(toy, expected, expected_in_eight_bits):
    asker, rng, comparison = Asker(toy.folder, dtype="int8"), random.Random(1), Comparison()
    asked = [(rng.choice(TENANTS).id, random_text(rng)) for _ in range(80)]
    numbers = [asker.ask(tenant, [text]) for tenant, text in asked]
    nearer = 0
    for (tenant, text), number in zip(asked, numbers, strict=True):
        (rows,) = asker.wait(number)
        comparison.add(tenant, rows.logits, expected_in_eight_bits(tenant, text))
        off = [np.abs(rows.logits - answers(tenant, text)).max() for answers in (expected_in_eight_bits, expected)]
        nearer += off[0] < off[1]
    comparison.assert_equal("int8")
    assert nearer > 0.9 * len(asked), "the answers are those of 32 bits"
    asker.close()


@pytest.mark.parametrize("policy", OURS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_every_packing_with_every_policy_equals_the_reference(toy, expected, packing, policy):
    """Batches are small, so that policies have a choice. Texts are few and short, so that the reference is fast."""
    asker, rng = Asker(toy.folder, packing=packing, policy=policy, batch_tokens="64"), random.Random(f"{packing} {policy}")
    asked = []
    for _ in range(16):
        tenant, text = rng.choice(TENANTS).id, " ".join(WORDS[: rng.choice([1, 3, 9, 30])])
        deadline_ns = rng.choice([0, time.monotonic_ns() + 10**11])
        asked.append((tenant, text, asker.ask(tenant, [text], deadline_ns=deadline_ns)))
    comparison = Comparison()
    for tenant, text, number in asked:
        (rows,) = asker.wait(number)
        comparison.add(tenant, rows.logits, expected(tenant, text))
    comparison.assert_equal("fp32")
    asker.close()


@pytest.mark.parametrize(("policy", "packing"), [("das:rows=4", Concat), ("slotted_das:rows=4", Slotted)])
def test_the_rows_and_slots_of_a_policy_reach_the_packing(toy, monkeypatch, policy, packing):
    arrange, seen = packing.arrange, []
    monkeypatch.setattr(
        packing, "arrange", lambda own, lengths, places=None: seen.append(places) or arrange(own, lengths, places)
    )
    asker = Asker(toy.folder, policy=policy, packing=packing.__name__.lower())
    asker.wait(asker.ask("acme", [WORDS[0], WORDS[1]]))
    asker.close()
    assert seen and all(places is not None and (places.slot is not None) == (packing is Slotted) for places in seen)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_late_failure_is_answered_and_the_next_batch_runs(toy, monkeypatch, overlap):
    asker = Asker(toy.folder, overlap=overlap)
    with monkeypatch.context() as broken:
        broken.setattr(Gatherer, "sums", lambda *_: (_ for _ in ()).throw(OSError("the disk is gone")))
        assert "the disk is gone" in str(asker.wait(asker.ask("acme", [WORDS[0]])))
    (rows,) = asker.wait(asker.ask("acme", [WORDS[0]]))
    assert rows.labels
    asker.close()


@pytest.mark.parametrize(
    "window, dtype",
    [(Window(3), "int8"), (Window(3), "bf16"), (Window(5), "fp16"), (Window(2), "int8"), (Window(3, causal=True), "fp16")],
    ids=str,
)
def test_any_window_and_any_dtype_equals_the_reference(tmp_path, window, dtype):
    toy = make_toy(tmp_path, replace(CONFIG, window=window), dtype)
    reference, asker, rng = Reference.open(toy.folder), Asker(toy.folder, plot_hot="3"), random.Random(3)
    asked = [(tenant.id, text := random_text(rng), asker.ask(tenant.id, [text])) for tenant in TENANTS for _ in range(4)]
    comparison = Comparison()
    for tenant, text, number in asked:
        comparison.add(tenant, asker.wait(number)[0].logits, reference.forward(text, tenant).numpy())
    comparison.assert_equal("fp32")
    asker.close()


def test_the_service_does_not_start_if_its_hot_rows_cannot_be_locked(toy, monkeypatch):
    monkeypatch.setattr(rows_module, "_libc", type("Libc", (), {"mlock": staticmethod(lambda *_: -1)}))
    tables = [Table(path.parent) for path in (toy.folder / "plot").glob("*/*/meta.json")]
    needed = sum(3 * table.meta.row_bytes for table in tables)
    with pytest.raises(InvalidInput, match=naming(f"{needed:,}", "ulimit -l", "--ulimit memlock=-1", "plot_hot")):
        Asker(toy.folder, plot_hot="3")


def test_a_flipped_bit_of_a_table_fails_only_texts_that_read_its_row(toy, tmp_path, reference):
    folder = _copy(toy, tmp_path)
    table = Table(folder / "plot/bio/1")
    windows = table.space.unpack(table.index.by_row())
    row = int(np.flatnonzero((windows > len(SPECIAL)).all(1))[0])  # three words
    words = " ".join(WORDS[token - 1 - len(SPECIAL)] for token in windows[row])
    values = folder / "plot/bio/1/values"
    content = np.fromfile(values, dtype=np.uint8)
    content[(row + 1) * table.meta.row_bytes + 5] ^= 1
    values.unlink()  # exported files are hard links to the store's
    content.tofile(values)
    asker = Asker(folder)
    failed = asker.wait(asker.ask("acme", [words]))
    assert isinstance(failed, Broken)
    assert names(failed, "'acme'", row + 1, "bio/1")
    for tenant in ("beta", "city"):
        (served,) = asker.wait(asker.ask(tenant, [words]))
        np.testing.assert_allclose(served.logits, reference.forward(words, tenant), atol=1e-3)
    mixed = [asker.ask(tenant, [words]) for tenant in ("city", "acme", "beta", "acme", "city")]
    assert [isinstance(asker.wait(number), Broken) for number in mixed] == [False, True, False, True, False]
    asker.close()


def test_a_truncated_table_fails_only_its_own_tenants(toy, tmp_path, reference):
    folder = _copy(toy, tmp_path)
    values = folder / "plot/bio/1/values"
    shorter = values.read_bytes()[:-2]
    values.unlink()
    values.write_bytes(shorter)
    asker = Asker(folder)
    with pytest.raises(Broken, match=naming("bio/1/values", len(shorter))):
        asker.ask("acme", [WORDS[0]])
    (served,) = asker.wait(asker.ask("beta", [WORDS[0]]))
    np.testing.assert_allclose(served.logits, reference.forward(WORDS[0], "beta"), atol=1e-3)
    asker.close()


def test_a_table_that_is_put_right_is_served_again(toy, tmp_path):
    folder = _copy(toy, tmp_path)
    values = folder / "plot/bio/1/values"
    whole = values.read_bytes()
    values.unlink()
    values.write_bytes(whole[:-2])
    backbone = Backbone(folder)
    watch = Watch(backbone)
    assert len(backbone.view.forest.failures()) == 1
    values.write_bytes(whole)
    eventually(lambda: not backbone.view.forest.failures())
    watch.close()


def test_pairs_have_a_second_segment(asker, reference):
    rows = asker.wait(asker.ask("acme", [WORDS[0], WORDS[5]], [WORDS[1], WORDS[2] * 3]))
    for text, pair, got in zip([WORDS[0], WORDS[5]], [WORDS[1], WORDS[2] * 3], rows, strict=True):
        np.testing.assert_allclose(got.logits, reference.forward(text, "acme", pair), atol=1e-3)
    alone = asker.wait(asker.ask("acme", [f"{WORDS[0]} {WORDS[1]}"]))[0]
    assert np.abs(alone.logits - rows[0].logits).max() > 1e-3


def test_top_k_gives_the_best_labels_first(asker, reference):
    (rows,) = asker.wait(asker.ask("city", [WORDS[3]], top_k=3))
    logits = reference.forward(WORDS[3], "city")[0]
    assert rows.labels == [f"topic-{i}" for i in logits.argsort(descending=True)[:3]]
    assert rows.scores == pytest.approx(logits.softmax(0).sort(descending=True).values[:3].tolist(), abs=1e-4)
    np.testing.assert_allclose(rows.logits, logits[None], atol=1e-3)  # one row for all labels


def test_top_k_is_refused_for_tag(asker):
    with pytest.raises(InvalidInput, match=naming("top_k", "'beta'")):
        asker.ask("beta", [WORDS[0]], top_k=2)
    asker.answers.pop()  # the request was refused


def test_a_tag_row_a_word_with_its_span(asker, reference):
    text = f"{WORDS[0]} \x00  {WORDS[1]},{WORDS[2]}"
    (rows,) = asker.wait(asker.ask("beta", [text]))
    assert [text[start:stop] for start, stop in rows.spans] == [WORDS[0], "\x00", f"{WORDS[1]},{WORDS[2]}"]
    assert rows.labels[1] == "" and rows.scores[1] == 0 and (rows.logits[1] == 0).all()
    np.testing.assert_allclose(rows.logits, reference.forward(text, "beta"), atol=1e-3)


def test_logits_that_are_not_finite_are_broken_and_no_answer(asker, monkeypatch):
    run = Engine.run
    monkeypatch.setattr(Engine, "run", lambda self, batch: [logits * np.nan for logits in run(self, batch)])
    failure = asker.wait(asker.ask("acme", [WORDS[0]]))
    assert isinstance(failure, Broken) and names(failure, "'acme'")
    monkeypatch.undo()
    assert not isinstance(asker.wait(asker.ask("acme", [WORDS[0]])), Exception)


def test_words_without_a_token_cost_the_engine_nothing(asker, reference, monkeypatch):
    """The answer has rows for them, but only rows with a token go through the last layer and the head."""
    read, run = [], Engine.run

    def watched(self, batch):
        read.extend(sum(sheet.rows_of) for sheet in batch.sheets)
        return run(self, batch)

    monkeypatch.setattr(Engine, "run", watched)
    text = " ".join([WORDS[0], *["\u200b"] * 500, WORDS[1]])
    rows, nothing = asker.wait(asker.ask("beta", [text, "\u200b \u200b"], [WORDS[2], WORDS[3]]))
    assert read == [3]  # two words, and the first token of a text without any
    assert len(rows.labels) == 502 and rows.labels[0] and rows.labels[501] and not any(rows.labels[1:501])
    np.testing.assert_allclose(rows.logits, reference.forward(text, "beta", WORDS[2]), atol=1e-3)
    assert nothing.labels == ["", ""] and (nothing.logits == 0).all()


def test_an_answer_with_too_much_text_is_refused_before_it_is_computed(asker):
    with pytest.raises(InvalidInput, match=naming(100, "20,000")):
        asker.ask("beta", ["a " * 20_000, *[WORDS[0]] * 99], truncate=True)
    with pytest.raises(InvalidInput, match=naming("4,018,000", "4,000,000")):
        asker.ask("acme", ["a " * 49_000] * 41, truncate=True)


def test_an_answer_of_too_many_numbers_is_refused_before_it_is_computed(asker, monkeypatch):
    monkeypatch.setattr("hplm.engine.service.MOST_NUMBERS", 100)
    with pytest.raises(InvalidInput, match=naming(2, 60, 100)):
        asker.ask("beta", [WORDS[0], "a " * 60], truncate=True)
    asker.answers.pop()  # the request was refused
    assert asker.wait(asker.ask("beta", [f"{WORDS[0]} a"]))[0].labels


def test_an_idle_engine_keeps_no_request(asker, monkeypatch):
    """A request keeps its tenant's files open, so deleted ones would stay on the disk until the next request."""
    requests, offer = [], Queue.offer

    def watched(self, texts):
        requests.append(weakref.ref(texts[0].request))
        return offer(self, texts)

    monkeypatch.setattr(Queue, "offer", watched)
    for number in [asker.ask(tenant, [WORDS[0]] * 3) for tenant in ("acme", "beta", "city")]:
        asker.wait(number)
    assert isinstance(asker.wait(asker.ask("acme", [WORDS[0]], deadline_ns=time.monotonic_ns() + 1)), DeadlineMissed)
    deadline = time.monotonic() + 30
    while any(request() is not None for request in requests) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert [request() for request in requests] == [None] * 4


def test_requests_are_answered_even_if_the_policy_fails(asker, reference, monkeypatch):
    def fails(*_):
        raise ZeroDivisionError("not that simple")

    monkeypatch.setattr(asker.service._line._scheduler, "_policy", type("Broken", (), {"select": fails})())
    for number in [asker.ask("acme", [WORDS[i]]) for i in range(3)]:
        assert asker.wait(number)[0].labels


def test_no_memory_for_a_tenants_adapter_fails_only_that_tenant(asker, monkeypatch):
    hold = Stager._hold
    own = asker.backbone.view.snapshot.find("acme").adapter

    def full(self, view, record, held):
        if record == own:
            raise MemoryError("the device is full")
        return hold(self, view, record, held)

    monkeypatch.setattr(Stager, "_hold", full)
    answers = [asker.wait(number) for number in [asker.ask(tenant, [WORDS[0]]) for tenant in ("acme", "city", "acme", "beta")]]
    assert [isinstance(answer, Broken) for answer in answers] == [True, False, True, False]
    assert names(answers[0], "'acme'", "the device is full")


def _copy(toy: Toy, tmp_path):
    return shutil.copytree(toy.folder, tmp_path / "1")


def test_a_corrupt_record_fails_only_its_tenant(toy, tmp_path, reference):
    folder = _copy(toy, tmp_path)
    bank = folder / "adapters" / "bottleneck-8x2.bank"
    data = bytearray(bank.read_bytes())
    data[4096 + 200] ^= 1  # the first record: acme's
    bank.unlink()
    bank.write_bytes(data)
    asker = Asker(folder)
    numbers = [(tenant, asker.ask(tenant, [WORDS[7]])) for tenant in ("acme", "city", "acme", "dune", "beta")]
    for tenant, number in numbers:
        answer = asker.wait(number)
        if tenant == "acme":
            assert isinstance(answer, Broken) and names(answer, "'acme'", 0, bank.name)
        else:
            np.testing.assert_allclose(answer[0].logits, reference.forward(WORDS[7], tenant), atol=1e-3)
    asker.close()


@pytest.mark.parametrize("damage", ["gone", "a folder", "no header", "another header"])
def test_a_bank_that_cannot_be_opened_fails_only_its_tenants(toy, tmp_path, damage):
    folder = _copy(toy, tmp_path)
    bank = folder / "adapters" / "bottleneck-4x2.bank"
    data = bank.read_bytes()
    bank.unlink()
    if damage == "a folder":
        bank.mkdir()
    elif damage != "gone":
        header = b"[]" if damage == "no header" else data[:4096].rstrip(b"\0").replace(b'"layers"', b'"sreyal"')
        bank.write_bytes(header.ljust(4096, b"\0") + data[4096:])
    asker = Asker(folder)
    broken, fine = asker.ask("beta", [WORDS[0]]), asker.ask("acme", [WORDS[0]])
    assert isinstance(asker.wait(broken), Broken) and not isinstance(asker.wait(fine), Exception)
    asker.close()


def test_the_reference_is_deterministic(toy, reference):
    assert (reference.forward(WORDS[4], "acme") == Reference.open(toy.folder).forward(WORDS[4], "acme")).all()
