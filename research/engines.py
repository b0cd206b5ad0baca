"""Compares an engine for two backbones with an engine each on the same cores: texts in time at 1.5 times the capacity.

    python -m research.engines [--size minilm]

Both engines' models answer the same requests, in turns. An engine of its own has half of the cores, the common one has all.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.server import requests_of, texts_of
from builder.publish.model_configs import ServingOptions, write_group
from hplm.parameters import parameters_of
from hplm.server import TritonServer
from hplm.simulate.arrivals import Stream
from hplm.tenants.models import upper_config
from loadtest.generator import Load, measured
from loadtest.load import send
from testing.random_repository import write
from testing.random_store import SIZES

NAMES, TENANTS, TEXTS, TOKENS, OVERLOAD = ("first", "second"), 8, 8, 128, 1.5
ALLOWED = 2.0, 12.0  # times that a request takes at the capacity with 32 of them at once


def main() -> None:
    parser = argparse.ArgumentParser("research.engines", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", choices=("minilm", "bert-base"), default="minilm")
    parser.add_argument("--seconds", type=float, default=15.0, help="of overload, for each server")
    parser.add_argument("--turns", type=int, default=4)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hplm-engines-") as scratch:
        repositories = {"each": Path(scratch) / "each", "common": Path(scratch) / "common"}
        for name in NAMES:
            write(repositories["each"], replace(SIZES[given.size], name=name), TENANTS, ServingOptions(slots=32, threads=1))
        shutil.copytree(*repositories.values())
        parameters = parameters_of(upper_config(repositories["each"], NAMES[0])) | {"threads": "0"}
        for name in NAMES:
            shutil.rmtree(repositories["common"] / f"{name}-upper")
        write_group(repositories["common"], NAMES, parameters, "")
        texts = texts_of(SIZES[given.size], [TOKENS] * 512)
        capacity, in_time = 0.0, {what: list[float]() for what in repositories}
        for turn in range(-1, given.turns):
            for what in sorted(repositories, reverse=bool(turn % 2)):
                with TritonServer(repositories[what]) as server:
                    requests = _mixed(texts, None)
                    rate = measured(Load(server.http_url, requests, seconds=8.0, connections=32), "capacity", 6.0).req_per_s
                    if turn < 0:  # the first measures the capacity alone, which both are asked to exceed
                        capacity = max(capacity, rate)
                        print(f"{what}: {TEXTS * rate:.1f} texts/s", flush=True)
                        continue
                    seconds = tuple(32e3 / capacity / 12 * times for times in ALLOWED)
                    drawn = Stream(OVERLOAD * capacity, given.seconds, allowed_ms=(seconds[0], seconds[1])).draw(turn)
                    allowed = drawn.allowed_ns / 1e9
                    load = Load(server.http_url, _mixed(texts, allowed), seconds=given.seconds + 1, connections=512)
                    (report,) = send(replace(load, arrivals=drawn.at_ns / 1e9))
                    in_time[what].append(report.in_time(allowed).mean())
                    print(f"{what}: {TEXTS * rate:.1f} texts/s, in time {in_time[what][-1]:.3f} of {len(drawn)}", flush=True)
        each, common = (np.array(in_time[what]) for what in ("each", "common"))
        print(f"an engine each over the common one: {each.mean() / common.mean():.2f}, by turn {np.round(each / common, 2)}")


def _mixed(texts: list[str], allowed: np.ndarray | None) -> list[bytes]:
    """Returns requests of both backbones, one after the other. The number of requests is that of `allowed`."""
    both = [requests_of(name, texts, TENANTS, allowed, TEXTS, outputs=("LABEL",)) for name in NAMES]
    return [both[number % 2][number] for number in range(len(both[0]))]


if __name__ == "__main__":
    main()
