"""The model `hplm` answers also when the other backbone of a link does not. A stand-in plays Triton's part."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from hplm.engine.across import NEEDED
from hplm.engine.answer import CONFIDENCE, fill
from hplm.errors import Broken, DeadlineMissed, Draining, InvalidInput, NoTenant, OutOfCapacity, QueueFull, Quota
from hplm.levels.calibration import Calibration
from hplm.levels.plan import Plan, Step
from hplm.metrics.meter import Meter
from hplm.metrics.names import ACROSS_TEXTS
from hplm.tasks import TASKS, TextAnswer
from hplm.tenants.directory import MissingTarget
from hplm.tenants.link import ONWARD, Link
from hplm.tenants.ticket import Ticket
from tests.support.fake_triton import with_fake_triton

LINK = Link("large", "there", 1, Plan((Step(0, 0.7), Step(1, weight=0.6))))
LABELS = ("x", "y")
FOUND = b"what was looked up"
MODULES = ("backends.replies", "backends.forwarded", "backends.across")


class Tensor:
    def __init__(self, name, values):
        self._name, self._values = name, values

    def name(self):
        return self._name

    def as_numpy(self):
        return self._values


class Response:
    def __init__(self, output_tensors=(), error=None):
        self._tensors, self._error = list(output_tensors), error

    def output_tensors(self):
        return self._tensors

    def has_error(self):
        return self._error is not None

    def error(self):
        return self._error

    def outputs(self):
        return {one.name(): one.as_numpy() for one in self._tensors}


class TritonError:
    INTERNAL, UNAVAILABLE, INVALID_ARG, NOT_FOUND = "INTERNAL", "UNAVAILABLE", "INVALID_ARG", "NOT_FOUND"

    def __init__(self, message, code=None):
        self._message, self.code = message, code

    def message(self):
        return self._message


class Triton:
    """Answers requests of the model `hplm` to other models."""

    def __init__(self):
        self.calls, self.ready = [], True
        self.arrival_ns, self.deadline_ns = 1, 0
        self.level, self.version, self.found_version = 1, 3, 1
        self.refusal = None  # of the other backbone
        self.first = None  # the refusal of the first one

    def answer(self, call):
        self.calls.append(call)
        if call.model_name == "small-lookup":
            if self.first is not None:
                return Response(error=TritonError(self.first.wire()))
            signed = Ticket(1, 1, 1, self.found_version, self.arrival_ns, self.deadline_ns, 0, 0, across=1).sign(
                b"secret", FOUND
            )
            return Response([Tensor("TICKET", np.frombuffer(signed, dtype=np.uint8).reshape(1, -1))])
        if call.model_name == "small-upper":
            outputs = fill([own("x"), own("x", "[]"), own("x", "[[2, 3]]")]).outputs([*NEEDED, CONFIDENCE, "VERSION"], [5] * 3)
            return Response([Tensor(name, outputs[name]) for name in call.requested_output_names])
        if self.refusal is not None:
            return Response(error=TritonError(self.refusal))
        texts = len(call.inputs[0].as_numpy())
        answers = [
            TextAnswer(["y"], np.ones(1), np.array([[0.0, 4.0]], np.float32), np.zeros((1, 2)), level=self.level)
        ] * texts
        outputs = fill(answers).outputs(call.requested_output_names, [self.version] * texts)
        return Response([Tensor(name, values) for name, values in outputs.items()])

    @property
    def utilities(self):
        """A stand-in for Triton's `triton_python_backend_utils`."""

        def request(**fields):
            call = SimpleNamespace(**fields)
            call.exec = lambda: self.answer(call)
            return call

        return SimpleNamespace(
            InferenceRequest=request,
            InferenceResponse=Response,
            Tensor=Tensor,
            TritonError=TritonError,
            is_model_ready=lambda model: self.ready,
            get_input_tensor_by_name=lambda request, name: next((one for one in request.inputs() if one.name() == name), None),
        )


def own(label, onward=""):
    logits, spans = np.array([[1.0, 0.0]], np.float32), np.array([[0, 3]], np.int32)
    return TextAnswer([label], np.full(1, 0.7, np.float32), logits, spans, 0.75, 1, onward)


class Asked:
    """The model `hplm`, and a request of three texts. The last two go on."""

    def __init__(self, triton, modules):
        level = SimpleNamespace(calibration=Calibration(temperature=2.0))
        self.triton, self.meter = triton, Meter()
        self.tenant = SimpleNamespace(
            id="here", uid=1, version=1, task_object=TASKS["classify"], labels=LABELS, all_levels=(level,)
        )
        self.target = SimpleNamespace(version=3, all_levels=(level, level))
        self.missing = None
        directory = SimpleNamespace(target=self._target, upper_of="{}-upper".format)
        self._forwarded = modules["backends.forwarded"]
        self._across = modules["backends.across"].Across(
            directory, self.meter, lambda arrival_ns: {"hplm_forwarded": "a secret", "hplm_arrival_ns": arrival_ns}
        )

    def _target(self, link, tenant):
        if self.missing is not None:
            raise MissingTarget(self.missing)
        assert (link, tenant) == (LINK, self.tenant)
        return self.target

    def forward(self, outputs=("LABEL", "LEVEL", "VERSION", "CONFIDENCE"), **parameters):
        texts = [Tensor("TEXT", np.array([[b"a b"], [b"c d"], [b"e f"]], dtype=object))]
        request = SimpleNamespace(inputs=lambda: texts, request_id=lambda: "seven")
        forwarded = self._forwarded.Forwarded(
            request,
            None,
            {"tenant": "here", "hplm_forwarded": "a secret", "authorization": "Bearer mine", **parameters},
            self._forwarded.ENCODER,
            list(outputs),
            "small",
            self.tenant,
            1,
            0,
            1,
        )
        found = self._across.forward(forwarded, LINK)
        return Response(Tensor(*item) for item in found.items()) if isinstance(found, dict) else found

    @property
    def counted(self):
        return {labels[2]: count for (metric, labels), count in self.meter.take()[0].items() if metric is ACROSS_TEXTS}


@pytest.fixture
def asked():
    triton = Triton()
    with with_fake_triton(triton.utilities, *MODULES) as modules:
        yield Asked(triton, dict(zip(MODULES, modules, strict=True)))


def labels_of(response):
    assert not response.has_error()
    return [label.decode() for label in response.outputs()["LABEL"][:, 0]]


def test_unsure_texts_go_on_without_pruned_words_and_with_the_authority_of_the_link(asked):
    response = asked.forward(truncate=True, hplm_priority=4, top_k=1, unknown=1)
    assert labels_of(response) == ["x", "y", "y"]
    assert response.outputs()["LEVEL"].tolist() == [[1], [2], [2]]
    assert response.outputs()["VERSION"].tolist() == [[b"5"]] * 3
    assert asked.counted == {"joined": 2}
    lookup, upper, there = asked.triton.calls
    assert lookup.parameters["hplm_across"] == "from" and lookup.parameters["authorization"] == "Bearer mine"
    assert ONWARD in upper.requested_output_names and not upper.parameters
    assert (there.model_name, there.request_id) == ("large", "seven")
    assert there.inputs[0].as_numpy().tolist() == [[b"c d"], [b"f"]]
    assert there.parameters == {
        **{"tenant": "there", "hplm_forwarded": "a secret", "hplm_arrival_ns": 1, "hplm_across": "to"},
        **{"truncate": True, "hplm_priority": 4},
    }


def test_the_level_there_is_counted_behind_those_here(asked):
    asked.triton.level = 2
    assert asked.forward().outputs()["LEVEL"].tolist() == [[1], [3], [3]]


@pytest.mark.parametrize(
    "error",
    [
        DeadlineMissed("it is late"),
        QueueFull("too many"),
        Quota("too often"),
        Draining("it ends"),
        OutOfCapacity("no memory"),
        NoTenant(),
        InvalidInput("too many tokens"),
    ],
)
def test_a_refusal_there_leaves_the_answers_in_hand(asked, error):
    asked.triton.refusal = f"in ensemble 'large', {error.wire()}"
    response = asked.forward()
    assert labels_of(response) == ["x"] * 3 and response.outputs()["LEVEL"].tolist() == [[1]] * 3
    assert response.outputs()["CONFIDENCE"].tolist() == [[0.75]] * 3
    assert asked.counted == {error.word: 2}


def test_a_failure_there_is_answered_as_a_failure_and_logged(asked, caplog):
    for word, refusal in (("broken", Broken("a table is corrupt").wire()), ("internal", "something of Triton")):
        asked.triton.refusal = refusal
        response = asked.forward()
        assert response.error().code == "INTERNAL" and "'large'" in response.error().message()
        assert asked.counted == {word: 2}
        assert refusal in caplog.records[-1].message and refusal not in response.error().message()


def test_a_backbone_that_is_not_loaded_leaves_the_answers_in_hand(asked):
    asked.triton.refusal, asked.triton.ready = "failed for simple inference: model large is not found", False
    assert labels_of(asked.forward()) == ["x"] * 3
    assert asked.counted == {"draining": 2}


def test_time_that_is_out_is_not_spent_there(asked):
    asked.triton.deadline_ns = 2
    assert labels_of(asked.forward()) == ["x"] * 3
    assert asked.counted == {"deadline": 2} and len(asked.triton.calls) == 2


def test_arrival_and_timeout_go_on_also_of_a_request_that_named_none(asked):
    asked.triton.arrival_ns = arrival_ns = time.monotonic_ns()
    asked.triton.deadline_ns = arrival_ns + 3_600_000_000_000  # of its tenant, which only lookup knows
    assert labels_of(asked.forward()) == ["x", "y", "y"]
    there = asked.triton.calls[2]
    assert (there.timeout, there.parameters["hplm_arrival_ns"]) == (3_600_000_000, arrival_ns)
    assert not asked.triton.calls[0].timeout


def test_another_version_there_leaves_the_answers_in_hand_and_is_logged_once(asked, caplog):
    asked.missing = "it is served in version 9"
    for _ in range(3):
        assert labels_of(asked.forward()) == ["x"] * 3
    assert len(asked.triton.calls) == 6 and asked.counted == {"changed": 6}
    (record,) = caplog.records
    assert all(part in record.message for part in ("here", "small", asked.missing, "version 1", "hplm cascade across"))
    asked.missing = None
    assert labels_of(asked.forward()) == ["x", "y", "y"]
    asked.missing = "it is served in version 9"
    asked.forward()
    assert len(caplog.records) == 2


def test_a_version_that_changes_on_the_way_leaves_the_answers_in_hand(asked):
    asked.triton.version = 4
    assert labels_of(asked.forward()) == ["x"] * 3
    assert asked.counted == {"changed": 2}


def test_a_refusal_of_the_first_backbone_is_the_answer(asked):
    asked.triton.first = Quota("too often")
    response = asked.forward()
    assert (response.error().code, response.error().message()) == ("UNAVAILABLE", Quota("too often").wire())
    assert asked.counted == {}


def test_only_the_outputs_that_a_client_wants_are_sent(asked):
    assert set(asked.forward(["SCORE"]).outputs()) == {"SCORE"}
    assert CONFIDENCE not in asked.triton.calls[1].requested_output_names


def test_a_tenant_that_changed_before_lookup_keeps_its_answers(asked):
    asked.triton.found_version = 2
    assert labels_of(asked.forward()) == ["x"] * 3
    assert asked.counted == {"changed": 2} and len(asked.triton.calls) == 2
