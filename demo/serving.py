"""Serves what is built so far, asks it, adds domains and tenants while it runs, and draws what happened."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tqdm import tqdm

from builder.publish.export import export
from builder.publish.live import add_domain, add_tenant
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store
from builder.tasks.tasks import training_task
from demo.data import DemoTenant
from demo.picture import draw_bars
from hplm.errors import HplmError, InvalidInput
from hplm.server import TritonServer
from hplm.tenants.manager import Manager
from hplm.tenants.registry_writer import registries_of
from hplm.tenants.snapshot import Snapshot
from hplm.tenants.state_folder import EXPORTED_TENANTS
from hplm_client import HplmClient

QUESTIONS = 200  # of each tenant's test file
SHOWN = 100  # characters of a text


@dataclass(frozen=True)
class Score:
    tenant: DemoTenant
    accuracy: float  # share of correct answers to texts (classify) or words (tag)
    http_ms: float  # median latency of one text at a time
    grpc_ms: float


def live_server(store: Store, folder: Path) -> TritonServer:
    """Exports the store into a folder, and returns a server whose tenants can change."""
    shutil.rmtree(folder, ignore_errors=True)  # of an interrupted demo
    repository, state = folder / "repository", folder / "state"
    export(store, repository, ServingOptions())
    for registry in registries_of(repository, state).values():
        registry.begin()
    return TritonServer(repository, state=state)


def add_live(store: Store, folder: Path, tenant: DemoTenant) -> None:
    """Adds a tenant, and before it its domain, to the running server, unless they are served."""
    manager = Manager.open(folder / "repository", folder / "state")
    served = manager.current()
    if tenant.domain not in {branch.domain for branch in served.branches}:
        add_domain(manager, store, tenant.domain)
    if tenant.id not in {one.id for one in served.tenants}:
        add_tenant(manager, store, tenant.id)
        if late := manager.settle():
            raise HplmError(f"tenant {tenant.id} was added, but {', '.join(late)} does not serve it: see its log")


def first_answer(tenant: DemoTenant, http_url: str) -> str:
    """Asks a tenant the first question of its test file. Returns the question and the answer as text."""
    question = training_task(tenant.task).read(tenant.test)[0]
    with HplmClient(http_url, protocol="http") as client:
        answer = client.infer(question.text, tenant=tenant.id, truncate=True)
    words = [""] if tenant.task == "classify" else [f"{word} " for word in question.text.split()]
    answered, expected = (
        ", ".join(f"{word}{label}" for word, label in zip(words, labels, strict=True) if label != "O") or "nothing"
        for labels in ([row.label for row in answer.rows], question.labels)
    )
    text = question.text if len(question.text) <= SHOWN else f"{question.text[:SHOWN]}..."
    return f"{tenant.id}: {tenant.question}\n  {text}\n  -> {answered}; expected: {expected}"


def evaluate(tenants: Sequence[DemoTenant], http_url: str, grpc_url: str) -> list[Score]:
    """Asks each tenant QUESTIONS questions of its test file, half over HTTP, half over gRPC."""
    scores: list[Score] = []
    with HplmClient(http_url, protocol="http") as http, HplmClient(grpc_url, protocol="grpc") as grpc:
        for tenant in tqdm(tenants, "asking", unit="tenant"):
            right, milliseconds = list[bool](), ([], [])
            for i, example in enumerate(training_task(tenant.task).read(tenant.test)[:QUESTIONS]):
                start = time.perf_counter()
                answer = (grpc, http)[i % 2].infer(example.text, tenant=tenant.id, truncate=True)
                milliseconds[i % 2].append((time.perf_counter() - start) * 1e3)
                right += [row.label == wanted for row, wanted in zip(answer.rows, example.labels, strict=True)]
            grpc_ms, http_ms = map(median, milliseconds)
            scores.append(Score(tenant, sum(right) / len(right), http_ms, grpc_ms))
    return scores


def draw(scores: Sequence[Score], store: Store, path: Path) -> None:
    """Draws the scores beside the most frequent labels, the sizes of what is stored, and the times of answers."""
    by_tenant = {one.tenant.id: (one.accuracy, one.tenant.majority_share, one.http_ms, one.grpc_ms) for one in scores}
    accuracy, majority, http, grpc = ({id: own[i] for id, own in by_tenant.items()} for i in range(4))
    panels = {
        "share of right answers": {"tenant": accuracy, "most frequent label": majority},
        "megabytes": {"": _megabytes(store, scores)},
        "milliseconds to an answer, median": {"HTTP": http, "gRPC": grpc},
    }
    draw_bars(panels, path, log=True)


def _megabytes(store: Store, scores: Sequence[Score]) -> dict[str, float]:
    """Returns the sizes of the parts of the store, and of the whole model that they come from."""
    upper, lower = store.folder / "upper.safetensors", store.folder / "lower" / "root-1.safetensors"
    tenants = [file for score in scores for file in store.tenant_folder(score.tenant.id, 1).glob("*.safetensors")]
    tables = [file for domain, version in store.domains() for file in store.table_folder(domain, version).iterdir()]
    parts = {
        "a tenant's adapter and head": (tenants, len(scores)),
        "a table of n-grams, average": (tables, len(store.domains())),
        "the upper half, shared by all": ([upper], 1),
        "a whole model": ([upper, lower], 1),
    }
    return {name: sum(file.stat().st_size for file in files) / 1e6 / count for name, (files, count) in parts.items()}


def is_ours(exported: Path, tenants: Set[str]) -> bool:
    """Whether an earlier demo, maybe of another size, has written the export that is there. Raises if somebody else has."""
    file = exported / EXPORTED_TENANTS
    if not file.exists():
        return False
    if others := {tenant.id for tenant in Snapshot.load(file).tenants} - tenants:
        raise InvalidInput(f"{exported} has the tenant {min(others)!r}, which is not the demo's: name another --repository")
    return True
