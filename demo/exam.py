"""Sends the demo's test texts to a running server, and scores the answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from builder.training.tasks import training_task
from demo.data import DemoTenant
from hplm_client import Answer, HplmClient

QUESTIONS = 200  # of each test file; half go over HTTP, half over gRPC


@dataclass(frozen=True)
class Mark:
    tenant: DemoTenant
    accuracy: float  # share of correct answers to texts (classify) or words (tag)
    http_ms: float  # median latency of one text at a time
    grpc_ms: float


def examine(tenants: tuple[DemoTenant, ...], http_url: str, grpc_url: str) -> list[Mark]:
    with HplmClient(http_url, protocol="http") as http, HplmClient(grpc_url, protocol="grpc") as grpc:
        return [_mark(tenant, {"http": http, "grpc": grpc}) for tenant in tqdm(tenants, desc="asking", unit="tenant")]


def _mark(tenant: DemoTenant, clients: dict[str, HplmClient]) -> Mark:
    right = asked = 0
    milliseconds: dict[str, list[float]] = {protocol: [] for protocol in clients}
    for i, example in enumerate(training_task(tenant.task).read(tenant.test).examples[:QUESTIONS]):
        protocol = "http" if i % 2 else "grpc"
        start = time.perf_counter()
        answer = clients[protocol].infer(example.text, tenant=tenant.id, truncate=True)
        milliseconds[protocol].append((time.perf_counter() - start) * 1e3)
        right += _right(answer, example.labels)
        asked += len(example.labels)
    medians = {protocol: float(np.median(times)) for protocol, times in milliseconds.items()}
    return Mark(tenant, right / asked, medians["http"], medians["grpc"])


def _right(answer: Answer, expected: Sequence[str]) -> int:
    labels = [row.label for row in answer.rows]
    if len(labels) != len(expected):
        raise ValueError(f"the answer has {len(labels)} rows for {len(expected)} words")
    return sum(label == wanted for label, wanted in zip(labels, expected, strict=True))
