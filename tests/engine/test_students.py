"""Students: a text waits once for each that answers it, and load lowers their number."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import TenantFile
from hplm.engine.backbone import Backbone
from hplm.engine.engine import Engine, computed
from hplm.engine.service import Service
from hplm.engine.settings import Settings
from hplm.engine.staging import Stager, StagingSettings
from hplm.levels.calibration import Calibration
from hplm.lookup.lookup import Lookup
from hplm.request.answers import CONFIDENCE, bits_of
from hplm.tenants.knowledge import StudentKnowledge
from hplm.tenants.students import First
from testing.random_store import change_version, random_store, random_students
from testing.reference import Reference
from testing.toy import CONFIG, random_text
from tests.engine.asker import PARAMETERS, Asker, stages_of, texts_of
from tests.engine.test_staging import Operations
from tests.support.device import DEVICE

TEAMS = (6, 3, 1)
LABELS = ["x", "y", "z"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two tenants with six students, one of a single layer and one of all, and a tenant without."""
    folder, tasks = tmp_path_factory.mktemp("students"), {"crew": "classify", "band": "tag", "solo": "classify"}
    tenants = [TenantFile(name, 1, "root", 1, task, LABELS, 4, "lora") for name, task in tasks.items()]
    store = random_store(folder / "store", CONFIG, tenants, spread=0.3)
    for number, tenant in enumerate(tenants[:2]):
        random_students(store, tenant, TEAMS, depth=1 + number, seed=number)
    export(store, folder / "repository", ServingOptions(dtype="fp32"))
    return folder / "repository/toy/1"


@pytest.mark.parametrize(("slots", "stages"), [("14", ()), ("2", ()), ("14", stages_of(0, 1))], ids=["", "few slots", "stages"])
def test_a_request_gets_the_number_of_students_of_its_rung(folder, slots, stages):
    """Half of the slots are for a batch: seven hold one text of six students and one of another, and one a single student."""
    asker, rng = Asker(folder, slots=slots, batch_tokens="64", stages=stages), random.Random(1)
    reference = Reference.open(folder)
    asked = []
    for number in range(30):
        tenant, texts, rung = rng.choice(["crew", "band", "solo"]), [random_text(rng, 9)] * rng.choice([1, 2]), 1 + number % 3
        asked.append((tenant, texts, rung, asker.ask(tenant, texts, confidence=True, rung=rung)))
    levels = set()
    assert asker.backbone.view.snapshot.find("crew").costs == (3.0, 1.5, 0.5)  # by which the load controller chooses
    for tenant, texts, rung, number in asked:
        members = TEAMS[rung - 1]
        wanted = reference.forward(texts[0], tenant, students=members)
        for answer in asker.wait(number):
            np.testing.assert_allclose(answer.logits, wanted, atol=1e-3)
            assert answer.level == (1 if tenant == "solo" else members)
            levels.add(answer.level)
            if tenant == "crew":
                assert answer.confidence == pytest.approx(float((wanted / 1.5).softmax(1).max()), abs=1e-3)
    assert levels == set(TEAMS)
    asker.close()


@pytest.mark.parametrize("others", [0, 1])
def test_the_last_layer_of_students_computes_only_what_their_heads_read(folder, others):
    """Beside a text that passes all layers, it computes all tokens: the other one's are in the same tensor."""
    backbone = Backbone(folder)
    engine = Engine(backbone.upper(), DEVICE, torch.float32)
    texts = texts_of(backbone, "crew", ["some words", "a few more words"]) + texts_of(backbone, "solo", ["words"])[:others]
    batch = Stager(backbone, StagingSettings(16, DEVICE, torch.float32)).stage(texts, lambda text, error: None)
    tokens, rows = batch.tokens, []  # that pass the middle of each layer

    def note(operation, given):
        if operation is torch.ops.aten.gelu:
            rows.append(len(given[0]))

    with Operations(note):
        computed(engine, batch)
    assert rows[0] == (tokens if others else len(texts))
    assert len(rows) == (CONFIG.upper_layers if others else 1)


@pytest.fixture(scope="module")
def cautious(folder, tmp_path_factory):
    """A tenant whose first two of six students answer alone where they are as sure as of every other text."""
    copied = tmp_path_factory.mktemp("cautious")
    tenant = TenantFile("crew", 1, "root", 1, "classify", LABELS, 4, "lora")
    store = random_store(copied / "store", CONFIG, [tenant], spread=0.3)
    found = random_students(store, tenant, TEAMS)
    export(store, copied / "before", ServingOptions(dtype="fp32"))
    reference, rng = Reference.open(copied / "before/toy/1"), random.Random(1)
    texts = [random_text(rng, 9) for _ in range(24)]
    sure = {text: sureness(reference.forward(text, "crew", students=2)) for text in texts}
    threshold = float(np.median([*sure.values()]))
    first = First(2, threshold, leaves=0.5, calibration=Calibration(temperature=1.5))
    teams = (replace(found.students.teams[0], first=first, cost=2.0), *found.students.teams[1:])
    change_version(store, tenant, students=StudentKnowledge(replace(found.students, teams=teams), found.members))
    export(store, copied / "repository", ServingOptions(dtype="fp32"))
    return copied / "repository/toy/1", reference, {text: 2 if own >= threshold else 6 for text, own in sure.items()}


def sureness(logits):
    return float((logits / 1.5).softmax(1).max())


def check_answer(answer, text, members, reference):
    wanted = reference.forward(text, "crew", students=members)
    np.testing.assert_allclose(answer.logits, wanted, atol=1e-3)
    assert answer.level == members and answer.confidence == pytest.approx(sureness(wanted), abs=1e-3)


def test_more_students_are_asked_where_the_first_are_unsure(cautious):
    """Some requests have texts of both kinds. All are answered once, which `close` checks."""
    folder, reference, members = cautious
    asker, texts = Asker(folder, slots="14", batch_tokens="64"), [*members]
    assert asker.backbone.view.snapshot.find("crew").costs == (2.0, 1.5, 0.5)
    asked = [(own, asker.ask("crew", own, confidence=True, rung=1)) for own in ([text] for text in texts)]
    asked += [(own, asker.ask("crew", own, confidence=True, rung=1)) for own in (texts[i : i + 3] for i in range(0, 24, 3))]
    for own, number in asked:
        for text, answer in zip(own, asker.wait(number), strict=True):
            check_answer(answer, text, members[text], reference)
    lone = asker.wait(asker.ask("crew", texts[:1], rung=2))[0]
    assert lone.level == 3, "a rung without first students asks all"
    asker.close()


@pytest.mark.parametrize("end", ["no room", "no time", "closed"])
def test_the_first_students_answer_counts_where_there_is_no_room_or_time_for_more(cautious, end):
    folder, reference, members = cautious
    text = next(text for text, own in members.items() if own == 6)
    now, answers = [10**9], []
    settings = Settings.read({**PARAMETERS, "slots": "14", "queue_texts": "3" if end == "no room" else "100"})
    service, backbone = Service([(folder, settings)], now_ns=lambda: now[0]), Backbone(folder)
    view, limit = backbone.view, {"deadline_ns": 2 * 10**9} if end == "no time" else {}
    form = Lookup(backbone).resolve(view, view.snapshot.find("crew"), [text], arrival_ns=now[0], **limit)
    form.wanted = bits_of({CONFIDENCE})
    service.submit(form, answers.append)
    encoder = service.encoder
    staged = encoder.prepare()
    if end == "closed":
        encoder.close()
    encoder.compute(staged)
    if end == "no time":
        assert not answers, "the others are not asked"
        now[0] = 3 * 10**9
        encoder.expire()
    assert encoder.prepare() is None
    ((answer,),) = answers
    check_answer(answer, text, 2, reference)
    service.close()
