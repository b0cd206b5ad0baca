"""`hplm bench sizing`: how many requests a second each core answers at a p99, for models and lengths of texts.

A closed loop measures the capacity of a server. Then requests arrive as a Poisson process, at shares of that capacity.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import product
from typing import Annotated

import numpy as np

from bench.rows import ONLY_QUICK, Row, Rows, Seconds, ServedDtype, Size, Whole, benchmark, expect_text, say
from bench.server import private_bytes, random_export, requests_of, texts_of
from builder.publish.model_configs import ServingOptions
from hplm.server import TritonServer
from loadtest.generator import Load, measured
from loadtest.load import send
from testing.random_store import SIZES

LIMITS_MS = (100, 200, 500)  # of the p99
ASKED = 500  # requests a second, for which the cores are counted
TENANTS = 16  # requests go to them in turn
CONNECTIONS = 64  # of the closed loop
MOST_CONNECTIONS = 512
PATIENCE_S = 120.0  # of a client: on a busy machine, a request may wait for long
TEXTS = 1024  # different ones, sent in turn
SEED = 0  # of arrivals
WARM_UP = 0.5  # of the capacity
MB = 1e6


@benchmark(sizes=("toy",), tokens=(16,), loads=(0.2, 0.5), seconds=0.3)
def sizing(
    *,
    sizes: tuple[Size, ...] = ("bert-base", "minilm"),
    tokens: tuple[Whole, ...] = (32, 128),
    loads: Annotated[tuple[float, ...], ONLY_QUICK] = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9),
    seconds: Seconds = 30.0,
    dtype: ServedDtype = "auto",
) -> Rows:
    """Serves random weights at several loads. Measures each p99, and what a core answers at a p99 of 100, 200 and 500 ms.

    Requests have one text and no deadline. The load generator shares the cores with the server.

    :param sizes: of the models
    :param tokens: of the texts
    """
    for size, length in product(sizes, tokens):
        expect_text(length, size)
    cores = len(os.sched_getaffinity(0))
    for size, length in product(sizes, tokens):
        yield from _sized(size, length, sorted(loads), seconds, dtype, cores)
    yield Row("cores", cores)


def _sized(size: Size, tokens: int, loads: Sequence[float], seconds: float, dtype: str, cores: int) -> Rows:
    options, model = ServingOptions(dtype=dtype, slots=2 * TENANTS), f"{size}-{tokens}"
    with random_export(SIZES[size], TENANTS, options) as folder, TritonServer(folder.parent) as server:
        requests = requests_of(folder.name, texts_of(SIZES[size], [tokens] * TEXTS), TENANTS)
        say(f"{model}: the capacity")
        closed = Load(server.http_url, requests, seconds=seconds / 2, connections=CONNECTIONS, patience=PATIENCE_S)
        capacity = measured(closed, "the capacity", seconds / 4).req_per_s
        yield Row(f"{model}/req_per_s", capacity, "/s")
        points: list[tuple[float, float]] = []
        say(f"{model}: the first batches of each size, which take longer")
        send(_arriving(server, requests, WARM_UP * capacity, seconds / 2))
        for share in loads:
            say(f"{model}: {share:g} of {capacity:.1f} requests a second")
            (report,) = send(_arriving(server, requests, share * capacity, seconds))
            report.expect_success(model, "give --seconds more, or --loads less")
            points.append((share * capacity / cores, report.percentile_ms(99)))
            yield Row(f"{model}/p50_ms/{points[-1][0]:.4f}", report.percentile_ms(50), "")
            yield Row(f"{model}/p99_ms/{points[-1][0]:.4f}", points[-1][1], "")
        yield Row(f"{model}/private_mb", private_bytes(server.pid) / MB, "MB")  # of all processes, without mapped tables
    for limit in LIMITS_MS:
        yield Row(f"{model}/per_core/p99_{limit}_ms", within(points, limit), "/s")
    for limit in LIMITS_MS:
        rate = within(points, limit)
        yield Row(f"{model}/cores_for_{ASKED}/p99_{limit}_ms", ASKED / rate if rate else None)


def _arriving(server: TritonServer, requests: Sequence[bytes], rate: float, seconds: float) -> Load:
    """Returns a load that arrives as a Poisson process."""
    arrivals = np.random.default_rng(SEED).exponential(1 / rate, max(2, round(rate * seconds))).cumsum()
    load = {"seconds": arrivals[-1] + 1.0, "connections": MOST_CONNECTIONS, "arrivals": arrivals}
    return Load(server.http_url, requests, patience=PATIENCE_S, **load)


def within(points: Sequence[tuple[float, float]], limit: float) -> float | None:
    """Returns the rate at which the p99 reaches a limit, by a line between two of the points (rate, p99), which ascend.

    The highest rate if no p99 is above it, and None if all are.
    """
    for at, (rate, p99) in enumerate(points):
        if p99 > limit:
            if not at:
                return None
            before, below = points[at - 1]
            return float(np.interp(limit, (below, p99), (before, rate)))
    return points[-1][0]
