"""`hplm bench cascade`: texts that leave early at exits, beside the full stack alone."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import numpy as np

from bench.rows import ONLY_QUICK, OtherModel, Positive, Rows, ServedDtype, Whole, benchmark, rows_of, say
from builder.evaluation.evaluation import opened
from builder.exits.answers import answered_by, calibration_by
from builder.exits.build import build_exits
from builder.exits.heads import outputs_of, states_of
from builder.exits.thresholds import Answered, Estimate
from builder.learning.limits import Budget
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.publish.precision import served_precision
from builder.store.resumable import write_json
from builder.store.store import Store
from builder.tables.root import RootOptions, build_root
from builder.tasks.tasks import training_task
from builder.training.build import build_tenant
from demo.building import minilm
from demo.data import MANIFEST, DemoTenant, data_of, stored, write_demo_data
from demo.domains import DOMAINS
from demo.tasks import TASKS
from hplm.arrays import Array
from hplm.engine.backbone import Backbone
from hplm.engine.engine import Precision, resolve_device
from hplm.errors import InvalidInput
from hplm.server import TritonServer
from hplm.tasks.answers import softmax
from hplm.tenants.exits import Plan
from hplm.tenants.snapshot import Snapshot
from loadtest.encode import infer_request
from loadtest.generator import Load
from loadtest.load import Report, send

TARGETS = {
    "work": ("<=", 0.6),
    "points_lost": ("<=", 0.5),
    "one_client/over_full": ("<=", 0.75),
    "loaded_mean/over_full": ("<=", 0.7),
    "loaded_p99/over_full": ("<=", 1.0),
    "throughput/over_full": (">=", 1.45),
    "overload/over_full": (">=", 1.5),
    "served/as_expected": (">=", 0.98),
    "served/left_as_expected": (">=", 0.95),
}
SIZES = {"train": 2000, "dev": 600, "test": 1500}  # texts of each file
TRAINING = {"adapter": "lora", "rank": 16, "learning_rate": 2e-3, "body_rate": 3e-5, "epochs": 1}
FOLDER = Path(".hplm/bench-cascade")
KEEP = 0.03  # share of the n-grams that have rows in the table
LOAD, OVERLOAD = 0.7, 3.0  # of the full stack's capacity
ALLOWED = (2.0, 12.0)  # the deadlines of an overload, in times that the full stack takes for a batch; drawn evenly
BATCH_TOKENS = 1024  # so that a batch takes a fraction of the deadlines
CLIENTS, MOST_CONNECTIONS = 64, 512
OUTPUTS = ("LABEL", "LEVEL")
COMPARED = 2000  # answers that are compared with those offline, at most


@benchmark(questions=2, texts=160, minutes=0.02, seconds=0.3, rounds=1)
def cascade(
    *,
    model: OtherModel = "",
    questions: Annotated[int, ONLY_QUICK] = 100,
    texts: Annotated[int, ONLY_QUICK] = 3000,
    minutes: Annotated[float, ONLY_QUICK] = 1.0,
    seconds: Positive = 20.0,
    rounds: Whole = 3,
    dtype: ServedDtype = "auto",
) -> Rows:
    """Builds tenants with exits on a model whose first two layers are in tables. Measures what exits lose and spare.

    Two servers of the same store, one without exits, answer in turn. `random`: as many texts leave, whichever they are. What
    judges a way has not chosen it. Later runs use what earlier ones have built.

    :param seconds: of each timed measurement
    :param rounds: turns of each timed measurement
    """
    store, asked = built(model, questions, texts, minutes)
    precision = served_precision(store, dtype, resolve_device("auto"))
    found = [judged(store, question, precision) for question in asked]
    offline = {
        "dtype": precision.name,
        "full_accuracy": float(np.mean([own.test.right[-1].mean() for own in found])),
        **described([own.test.way(own.plan) for own in found]),
        "random": {"points_lost": float(np.mean([own.test.lost_at_random(own.plan) for own in found]))},
    }
    yield from rows_of(offline, TARGETS)
    with _servers(store, precision.name) as servers:
        yield from rows_of(_served(found, servers, seconds, rounds), TARGETS)


def built(model: str, count: int, texts: int, minutes: float) -> tuple[Store, Sequence[DemoTenant]]:
    """Builds what FOLDER lacks. `texts`: of each file, at most."""
    device = resolve_device("auto")
    data, home = FOLDER / "demo", FOLDER / "store"
    tasks = [task for task in TASKS if task.task == "classify"][:count]
    given = {"model": model, "questions": len(tasks), "texts": texts, "minutes": minutes}
    settings, of = {**given, "keep": KEEP, **TRAINING}, FOLDER / "settings.json"
    if FOLDER.exists() and not (of.exists() and json.loads(of.read_bytes()) == settings):
        raise InvalidInput(f"{FOLDER} was built with other settings: remove it")
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_json(of, settings)
    if not (data / MANIFEST).exists():
        domains = [domain for domain in DOMAINS if domain.name in {task.domain for task in tasks}]
        sizes = {part: min(size, texts) for part, size in SIZES.items()}
        stored(data, {"sizes": sizes, "tasks": len(tasks)}, lambda: write_demo_data(data, domains, tasks, sizes))
    if not (home / "plot/root/1").exists():
        say(f"the root: adapting two layers, {minutes:g} minutes; then its table")
        corpora = [domain.corpus for domain in data_of(data).domains]
        build_root(model or str(minilm()), corpora, home, RootOptions(lower=2, keep=KEEP), Budget(minutes=minutes), device)
    store, asked = Store(home), data_of(data).tenants
    for own in asked:
        if not store.tenant_folder(own.id, 1).exists():
            say(f"tenant {own.id}")
            build_tenant(store, own.id, "root", own.task, own.train, own.dev, device=device, **TRAINING)
    return store, asked


class ExitResult(NamedTuple):
    """Holds what leaving does to test texts."""

    work: float  # the share of the layers' work that is left
    lost: Estimate


def described(ways: Sequence[ExitResult]) -> dict[str, float]:
    """Returns means over tenants, and how far off the points may be."""
    off = float(np.sqrt(np.sum([way.lost.off**2 for way in ways]))) / len(ways)
    work, lost = np.mean([(way.work, way.lost.points) for way in ways], axis=0).tolist()
    return {"work": work, "points_lost": lost, "points_lost_off": off}


@dataclass(frozen=True)
class AnsweredTexts:
    """Holds what the exits, and last the full stack, answer to some texts."""

    answered: Answered
    probabilities: Array  # exits + 1 x texts x labels, calibrated
    labels: Array  # exits + 1 x texts: numbers of labels
    wanted_numbers: Array  # of the right labels; -1: the tenant does not know it

    @property
    def right(self) -> Array:
        return (self.labels == self.wanted_numbers).astype(float)

    def way(self, leaving: Plan) -> ExitResult:
        left, texts = self.answered.exits_of(leaving), np.arange(len(self.wanted_numbers))
        return ExitResult(self.answered.cost_of(leaving), Estimate.of(self.right[-1] - self.right[left, texts]))

    def lost_at_random(self, leaving: Plan) -> float:
        """Returns the points that are expected to be lost if as many texts leave, whichever they are."""
        right = self.right.mean(axis=1)
        return 100 * float(right[-1] - right[self.answered.exits_of(leaving)].mean())


@dataclass(frozen=True)
class Judged:
    """A tenant's exits, and what they answer."""

    id: str
    plan: Plan  # the dearest
    choosing: AnsweredTexts
    test: AnsweredTexts
    names: Sequence[str]  # of the labels
    texts: list[str]  # of the test
    tokens: float  # of a text


def judged(store: Store, question: DemoTenant, precision: Precision) -> Judged:
    """Makes a tenant's exits if they are missing in this precision. The texts that judge them have chosen nothing."""
    tenant, task, device = store.known_tenant(question.id), training_task(question.task), resolve_device("auto")
    say(f"exits of {question.id} in {precision.name}, and their answers")
    build_exits(store, question.id, question.dev, precision, device)
    exits = (found := store.knowledge(store.known_tenant(question.id))).exits
    assert exits is not None  # they were made
    given = [task.read(question.dev), task.read(question.test)]
    states = [states_of(*opened(store, found, part, device, precision)) for part in given]
    full = calibration_by(given[0], tenant.labels, states[0].logits)
    calibrations, parts = exits.exits.calibrations, []
    for labelled, seen in zip(given, states, strict=True):
        outputs = [outputs_of(dict(head), exits.layout, own) for head, own in zip(exits.heads, seen.exits, strict=True)]
        answered, _ = answered_by(tenant, task, seen, outputs, calibrations, full, store.config)
        logits = [own.numpy() for own in (*outputs, seen.logits)]
        shares = [softmax(own / one.temperature) for own, one in zip(logits, (*calibrations, full), strict=True)]
        right = [example.labels[0] for example in labelled]
        wanted = [tenant.labels.index(label) if label in tenant.labels else -1 for label in right]
        parts.append(
            AnsweredTexts(answered, np.array(shares), np.array([own.argmax(axis=1) for own in logits]), np.array(wanted))
        )
    (choosing, test), texts = parts, [example.text for example in given[1]]
    return Judged(question.id, exits.exits.plans[0], choosing, test, tenant.labels, texts, float(states[1].lengths.mean()))


@contextmanager
def _servers(store: Store, dtype: str) -> Iterator[dict[str, _Server]]:
    """Gives a server of all tenants with their exits, and one of the same tenants without them."""
    options = ServingOptions(dtype=dtype, batch_tokens=BATCH_TOKENS, queue_texts=100_000)
    with TemporaryDirectory(prefix="served-", dir=FOLDER) as home, ExitStack() as running:
        servers = {}
        for way in ("exits", "full"):
            backbone = export(store, Path(home) / way, options).backbone
            if way == "full":
                path = Path(home) / way / backbone / "1" / Backbone.TENANTS
                whole = Snapshot.load(path)
                tenants = [replace(tenant, exits=None) for tenant in whole.tenants]
                Snapshot(whole.generation, whole.branches, tenants, whole.export).save(path)
            servers[way] = _Server(running.enter_context(TritonServer(Path(home) / way)).http_url, backbone)
        yield servers


class _Asked(NamedTuple):
    """A test text, its tenant, the right answer, what is answered where it leaves offline, and that exit."""

    tenant: str
    text: str
    wanted: str
    expected: str
    exit: int


class _Server(NamedTuple):
    address: str
    backbone: str

    def send(self, asked: Sequence[_Asked], connections: int, allowed: Array | None = None, **load: Any) -> Report:
        """Sends texts in turn. With deadlines, the server may refuse them, and choose cheaper plans than the dearest."""
        bounds = [{"hplm_rung": 1}] * len(asked) if allowed is None else [{"timeout": round(1e6 * one)} for one in allowed]
        requests = [
            infer_request(self.backbone, [one.text], one.tenant, outputs=OUTPUTS, parameters={"truncate": True, **bound})
            for one, bound in zip(asked, bounds, strict=True)
        ]
        (report,) = send(Load(self.address, requests, connections=connections, keep_bodies=True, **load))
        if allowed is None:
            report.expect_success("a load")
        return report


def _served(found: Sequence[Judged], servers: Mapping[str, _Server], seconds: float, rounds: int) -> dict[str, Any]:
    asked = _asked(found)
    taken: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))  # by figure and way
    for server in servers.values():
        server.send(asked, CLIENTS, seconds=seconds / 2)  # warms up
    for turn in range(rounds):
        say(f"one client and {CLIENTS} clients, turn {turn + 1} of {rounds}")
        for way, server in servers.items():
            taken["one_client"][way].append(1e3 * float(server.send(asked, 1, seconds=seconds).latencies.mean()))
            taken["throughput"][way].append(server.send(asked, CLIENTS, seconds=seconds).req_per_s)
    alone = float(np.mean(taken["throughput"]["full"]))
    batch_s = BATCH_TOKENS / float(np.mean([own.tokens for own in found])) / alone
    for turn in range(rounds):
        say(f"{LOAD:g} and {OVERLOAD:g} times {alone:.0f} texts a second, turn {turn + 1} of {rounds}")
        random = np.random.default_rng(turn)
        (texts, due), (crowd, crowd_due) = (_poisson(asked, share * alone, seconds, random) for share in (LOAD, OVERLOAD))
        allowed = random.uniform(ALLOWED[0] * batch_s, ALLOWED[1] * batch_s, len(crowd))
        for way, server in servers.items():
            took = 1e3 * server.send(texts, MOST_CONNECTIONS, seconds=due[-1] + 1, arrivals=due).latencies
            taken["loaded_mean"][way].append(float(took.mean()))
            taken["loaded_p99"][way].append(float(np.percentile(took, 99)))
            report = server.send(crowd, MOST_CONNECTIONS, allowed, seconds=crowd_due[-1] + 1, arrivals=crowd_due)
            answers = zip(report.in_time(allowed), report.numbers, report.bodies, strict=True)
            right = sum(_answer(body)[0] == crowd[number].wanted for in_time, number, body in answers if in_time)
            taken["overload"][way].append(right / len(crowd))
    figures: dict[str, Any] = {}
    for what, own in taken.items():
        ours, full = (float(np.mean(own[way])) for way in servers)
        figures[what] = {"exits": ours, "full": full, "over_full": ours / full if full else None}
    # One of a hundred texts that could leave is audited, and goes on.
    report = servers["exits"].send(asked[:COMPARED], CLIENTS, seconds=600.0, count=min(COMPARED, len(asked)))
    answers = zip(report.numbers, map(_answer, report.bodies), strict=True)
    same = [(label == asked[number].expected, exit == asked[number].exit) for number, (label, exit) in answers]
    return {**figures, "served": dict(zip(("as_expected", "left_as_expected"), np.mean(same, axis=0).tolist(), strict=True))}


def _asked(found: Sequence[Judged]) -> list[_Asked]:
    every = []
    for own in found:
        names, exits = np.array([*own.names, ""]), own.test.answered.exits_of(own.plan)
        answered = own.test.labels[exits, np.arange(len(exits))]
        answers = names[own.test.wanted_numbers].tolist(), names[answered].tolist(), exits.tolist()
        every += [_Asked(own.id, *one) for one in zip(own.texts, *answers, strict=True)]
    return [every[number] for number in np.random.default_rng(5).permutation(len(every)).tolist()]


def _poisson(asked: Sequence[_Asked], rate: float, seconds: float, random: np.random.Generator) -> tuple[list[_Asked], Array]:
    due = np.cumsum(random.exponential(1 / rate, max(2, round(rate * seconds))))
    return [asked[number] for number in random.integers(0, len(asked), len(due)).tolist()], due


def _answer(body: bytes) -> tuple[str, int]:
    """Returns the label of an answer, and the exit: JSON comes first, and behind it the outputs' bytes."""
    head, end = json.JSONDecoder().raw_decode(body.decode("latin-1"))
    parts: dict[str, bytes] = {}
    for output in head["outputs"]:
        size = output["parameters"]["binary_data_size"]
        parts[output["name"]], end = body[end : end + size], end + size
    return parts["LABEL"][4:].decode(), int.from_bytes(parts["LEVEL"], "little") - 1
