"""A real Triton says how sure each answer is. The confidence belongs to the logits of the same answer."""

from __future__ import annotations

import json
import random
import urllib.request

import numpy as np
import pytest

from builder.publish.live import update_tenant
from builder.store.calibrations import Calibrated, save_calibrated
from hplm.levels.calibration import Calibration
from tests.confidence import CALIBRATIONS, of_logits, of_passage
from tests.tasks import TENANTS, question

pytestmark = [pytest.mark.slow, pytest.mark.server("toy")]

OUTPUTS = ("LABEL", "LOGITS", "CONFIDENCE")


@pytest.mark.parametrize("model", ["tasks", "hplm"])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_every_task_has_the_confidence_of_its_logits(server, protocol, model):
    stock, reference, rng = server.stock(protocol), server.reference("tasks"), random.Random(protocol)
    for tenant in TENANTS:
        texts, pairs = zip(*(question(rng, tenant.task) for _ in range(4)), strict=True)
        answer = stock.ask(texts, tenant.id, pairs if pairs[0] is not None else None, OUTPUTS, model)
        assert answer["CONFIDENCE"].shape == (4, 1) and answer["CONFIDENCE"].dtype == np.float32
        for i, (text, pair) in enumerate(zip(texts, pairs, strict=True)):
            labels = [label.decode() for label in answer["LABEL"][i]]
            expected = of_logits(tenant.id, labels, answer["LOGITS"][i])
            if expected is None:
                assert answer["CONFIDENCE"][i, 0] == pytest.approx(
                    of_passage(reference.windows(text, tenant.id, pair)), abs=1e-3
                )
            else:
                assert answer["CONFIDENCE"][i, 0] == pytest.approx(expected, abs=1e-6)


def test_a_request_without_outputs_gets_it_too(server):
    body = {
        "inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": ["a b"]}],
        "parameters": {"tenant": "many"},
    }
    request = urllib.request.Request(f"http://{server.http_url}/v2/models/tasks/infer", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        outputs = {output["name"]: output for output in json.load(answer)["outputs"]}
    assert outputs["CONFIDENCE"]["shape"] == [1, 1]
    assert outputs["CONFIDENCE"]["data"] == pytest.approx([of_logits("many", [], [outputs["LOGITS"]["data"]])], abs=1e-5)


def test_a_new_calibration_is_served_at_once(server):
    stock, live, store = server.stock(), server.manager("tasks"), server.built.stores["tasks"]
    before = stock.ask(["a b"], "many", outputs=OUTPUTS, model="tasks")
    save_calibrated(store, store.tenant("many"), Calibrated(Calibration(temperature=9.0), {}, {}))
    change = update_tenant(live, store, "many")
    save_calibrated(store, store.tenant("many"), Calibrated(CALIBRATIONS["many"], {}, {}))
    assert live.settle(change.generation) == []
    after = stock.ask(["a b"], "many", outputs=(*OUTPUTS, "VERSION"), model="tasks")
    assert after["VERSION"][0, 0] == b"%d" % change.after and (after["LOGITS"] == before["LOGITS"]).all()
    least = np.abs(after["LOGITS"][0, 0]).min()
    assert after["CONFIDENCE"][0, 0] == pytest.approx(1 / (1 + np.exp(-least / 9)), abs=1e-6)
    assert after["CONFIDENCE"][0, 0] != pytest.approx(before["CONFIDENCE"][0, 0], abs=1e-6)
    assert live.settle(live.roll_back("many").generation) == []


def test_a_tenant_without_calibration_answers_minus_one(server):
    answer = server.stock("grpc").ask(["a b"], "find", ["b c d"], OUTPUTS, "tasks")
    assert answer["CONFIDENCE"].tolist() == [[-1.0]]
