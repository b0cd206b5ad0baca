"""All tasks in mixed batches through lookup, service and engine give the answers of the reference."""

import random
import time

import numpy as np
import pytest

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.engine.lookup import Lookup
from hplm.engine.service import Service
from hplm.engine.settings import Settings
from hplm.errors import InvalidInput
from hplm.model.weights import save_weights
from hplm.tenants.ticket import Ticket
from testing.random_store import random_store
from testing.reference import Reference
from testing.toy import CONFIG, DOMAINS, WORDS, random_text
from tests.engine.asker import PARAMETERS, Asker
from tests.support.message import mentioning
from tests.tasks import TENANTS, expected_logits, make_tasks, question, same_labels

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return make_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def reference(tasks):
    return Reference.open(tasks.folder)


@pytest.fixture
def service(tasks):
    service = Service([(tasks.folder, Settings.read(PARAMETERS))])
    yield service
    service.close()


def ask(service, reference, tenant_id, texts, pairs, respond, truncate=False):
    view = reference.backbone.view
    tenant = view.snapshot.find(tenant_id)
    resolved = Lookup(reference.backbone).resolve(view, tenant, texts, pairs, truncate)
    ticket = Ticket(reference.backbone.view.snapshot.export_number, 0, tenant.uid, tenant.version, time.monotonic_ns(), 0, 0, 0)
    service.submit(ticket, resolved, lambda answer, counted: respond(answer))


def test_every_task_in_mixed_batches_equals_the_reference(service, reference):
    rng, asked, answers = random.Random(5), [], {}
    for number in range(60):
        tenant = TENANTS[number % len(TENANTS)]
        texts, pairs = zip(*(question(rng, tenant.task) for _ in range(rng.choice([1, 1, 3]))), strict=True)
        pairs = None if pairs[0] is None else list(pairs)
        asked.append((tenant, texts, pairs))
        ask(service, reference, tenant.id, list(texts), pairs, lambda rows, number=number: answers.update({number: rows}))
    service.close()
    several = set()
    for number, (tenant, texts, pairs) in enumerate(asked):
        for i, rows in enumerate(answers[number]):
            pair = pairs[i] if pairs else None
            expected = reference.answer(texts[i], tenant.id, pair)
            assert same_labels(tenant.task, rows.labels, expected.labels)
            assert [tuple(span) for span in rows.spans.tolist()] == expected.spans
            logits = expected_logits(reference, tenant, texts[i], pair)
            np.testing.assert_allclose(rows.logits, logits, atol=1e-3)
            several.add((tenant.id, len(rows.labels), rows.labels[:1] == [""]))
    assert {count for name, count, _ in several if name == "many"} >= {2, 3}  # the labels do vary
    assert {empty for name, _, empty in several if name == "perhaps"} == {True, False}


def test_a_missing_or_unreadable_passage_is_refused(service, reference):
    with pytest.raises(InvalidInput, match=mentioning(1, "TEXT", "TEXT_PAIR")):
        ask(service, reference, "find", [WORDS[0]], None, print)
    with pytest.raises(InvalidInput, match=mentioning(1)):
        ask(service, reference, "find", [WORDS[0]], ["\u200b"], print)


@pytest.mark.parametrize("truncate", [False, True])
def test_a_passage_that_is_too_long_is_answered_from_anywhere(service, reference, truncate):
    rng, answers = random.Random(1), []
    passages = [" ".join(rng.choices(WORDS, k=200)) for _ in range(12)]
    ask(service, reference, "find", WORDS[:12], passages, answers.append, truncate=truncate)
    service.close()
    (rows,) = answers
    for text, passage, own in zip(WORDS[:12], passages, rows, strict=True):
        expected = reference.answer(text, "find", passage)
        assert (own.labels, own.spans.tolist()) == (expected.labels, [list(span) for span in expected.spans])
        assert passage.startswith(own.labels[0], own.spans[0, 0])
    assert any(own.spans[0, 0] > len(passage) / 2 for own, passage in zip(rows, passages, strict=True))


def test_a_question_that_leaves_no_room_for_the_passage_is_refused_or_cut(service, reference):
    question, passage, answers = " ".join(WORDS[:40]), " ".join(WORDS[:150]), []
    with pytest.raises(InvalidInput, match=mentioning(64, "truncate=true")):
        ask(service, reference, "find", [question], [passage], answers.append)
    ask(service, reference, "find", [question], [passage], answers.append, truncate=True)
    service.close()
    ((rows,),) = answers
    assert rows.labels == reference.answer(question, "find", passage, truncate=True).labels


def test_a_value_far_from_0_is_exact_in_16_bits(tmp_path):
    """A 16-bit sum with the bias would round it: values around 2,000 to the next 8."""
    (mark,) = (tenant for tenant in TENANTS if tenant.id == "mark")
    store = random_store(tmp_path / "store", CONFIG, [mark], DOMAINS, spread=0.3)
    _, head = store.tenant_weights(mark)
    save_weights({**head, "bias": head["bias"] + 1990}, store.tenant_folder("mark", 1) / "head.safetensors")
    export(store, tmp_path / "repository", ServingOptions(dtype="bf16"))
    asker = Asker(tmp_path / "repository" / "toy" / "1", dtype="bf16")
    reference, rng = Reference.open(tmp_path / "repository" / "toy" / "1"), random.Random(0)
    texts = [random_text(rng, 20) for _ in range(30)]
    found = [float(rows.logits[0, 0]) for rows in asker.wait(asker.ask("mark", texts))]
    asker.close()
    expected = [float(reference.forward(text, "mark")) for text in texts]
    assert max(abs(own - right) for own, right in zip(found, expected, strict=True)) < 0.05 * (max(expected) - min(expected))
