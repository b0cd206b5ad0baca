"""Times the ways of answering through a real Triton, with the native load generator in a process of its own."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence

import numpy as np

from bench.measuring.cascade_traffic import IN_FLIGHT, Asked, Poisson, Sent
from hplm.server import TritonServer
from loadtest.encode import Parameter, infer_request
from loadtest.load import Load, send

MOST_CONNECTIONS = 512
DECODER = json.JSONDecoder()


class Served:
    """A running server."""

    def __init__(self, server: TritonServer, backbone: str, asked: Sequence[Asked]) -> None:
        host, port = server.http_url.split(":")
        self._host, self._port = host, int(port)
        self._backbone, self._asked = backbone, asked

    def saturated(self, way: str, seconds: float) -> float:
        requests = [self._request(way, number) for number in range(len(self._asked))]
        (report,) = send(Load(self._host, self._port, requests, seconds=seconds, connections=IN_FLIGHT))
        report.expect_success(f"{way} at saturation")
        return report.req_per_s

    def open_loop(self, ways: Sequence[str], load: Poisson, allowed: np.ndarray | None = None) -> Sent:
        limits = allowed.tolist() if allowed is not None else [None] * len(load.due)
        numbered = zip(load.asked.tolist(), limits, strict=True)
        requests = [self._request(way, number, limit) for number, limit in numbered for way in ways]
        (report,) = send(
            Load(
                self._host,
                self._port,
                requests,
                seconds=float(load.due[-1]) + 1.0,
                connections=MOST_CONNECTIONS,
                arrivals=np.repeat(load.due, len(ways)),
                keep_bodies=True,
            )
        )
        latencies = np.full(len(requests), np.inf)
        labels: list[str | None] = [None] * len(requests)
        for number, status, took, body in zip(
            report.numbers.tolist(), report.statuses.tolist(), report.latencies.tolist(), report.bodies, strict=True
        ):
            if status == 200:
                latencies[number], labels[number] = took, label_in(body)
        return Sent(latencies.reshape(-1, len(ways)).max(axis=1), labels[len(ways) - 1 :: len(ways)])

    def _request(self, way: str, number: int, allowed: float | None = None) -> bytes:
        asked = self._asked[number]
        parameters: dict[str, Parameter] = {"truncate": True}
        if allowed is not None:
            parameters["timeout"] = round(1e6 * allowed)
        return infer_request(self._backbone, [asked.text], asked.of(way), outputs=("LABEL",), parameters=parameters)


def label_in(body: bytes) -> str:
    """Returns the first label of an answer: JSON, and behind it the output's bytes, each string with its length."""
    _, end = DECODER.raw_decode(body.decode("latin-1"))
    (length,) = struct.unpack_from("<I", body, end)
    return body[end + 4 : end + 4 + length].decode()
