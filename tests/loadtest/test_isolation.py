"""The counts and verdicts of the isolation measurement. `tests/bench` runs it on real servers."""

from __future__ import annotations

import pytest

from hplm.errors import HplmError
from loadtest.grpc_load import GrpcLoad
from loadtest.isolation import MOST_GROWTH_MB, judged
from loadtest.load import send
from loadtest.watch import Growth
from tests.support.wait import eventually


def _quiet(in_time: int, p99_ms: float | None = 10.0) -> dict:
    return {"in_time": in_time, "in_time_share": in_time / 100, "p99_ms": p99_ms}


@pytest.mark.parametrize(
    ("beside", "by_server", "growth", "holds"),
    [
        (_quiet(100, 50.0), 100, (50.0, 50.0), True),
        (_quiet(98, 50.0), 98, (0.0, 0.0), False),  # too few in time
        (_quiet(100, 51.0), 100, (0.0, 0.0), False),  # too slow beside the others
        (_quiet(100, 50.0), 102, (0.0, 0.0), False),  # the server counts too many
        (_quiet(0, None), 0, (0.0, 0.0), False),
        (_quiet(100), 100, (50.1, 0.0), False),
        (_quiet(100), 100, (0.0, 50.1), False),
    ],
)
def test_it_holds_only_if_the_tenant_the_counts_the_memory_and_the_log_do(beside, by_server, growth, holds) -> None:
    grown = dict(zip(("shared_memory", "log"), growth, strict=True))
    assert judged(_quiet(100), beside, {}, by_server, grown, of_strangers=True)["holds"] is holds
    of_tenant = judged(_quiet(100), beside, {}, by_server, grown, of_strangers=False)  # whose requests may take memory
    assert of_tenant["holds"] is (holds or max(growth) > MOST_GROWTH_MB)


@pytest.mark.slow
@pytest.mark.server("toy")
def test_failures_over_grpc_are_counted_and_are_no_throughput(server) -> None:
    (report,) = send(GrpcLoad(server.grpc_url, "toy", "nobody", ["ba"], in_flight=4, seconds=1.0))
    assert report.failed > 0 and report.answered == report.refused == report.cut_off == 0
    with pytest.raises(HplmError, match="toy"):
        report.expect_success("requests to toy")


def test_growth_is_the_most_that_was_seen() -> None:
    sizes = [1_000_000, 5_000_000]  # at first, and once
    with Growth({"file": lambda: sizes.pop(0) if sizes else 2_000_000}) as growth:
        eventually(lambda: growth.megabytes() == {"file": 4.0})
        eventually(lambda: not sizes)
    assert growth.megabytes() == {"file": 4.0}
