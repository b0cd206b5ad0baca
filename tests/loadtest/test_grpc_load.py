"""Loads over gRPC on real servers. Requests that are answered are in test_isolation.py."""

from __future__ import annotations

import pytest

from hplm.errors import HplmError
from loadtest.grpc_load import GrpcLoad
from loadtest.load import send

pytestmark = pytest.mark.slow


@pytest.mark.server("toy")
def test_failures_are_counted_and_are_no_throughput(server) -> None:
    load = GrpcLoad(server.grpc_url, "toy", "nobody", ["ba"], in_flight=4, seconds=1.0)
    (report,) = send(load)
    assert report.failed > 0 and report.answered == report.refused == report.cut_off == 0
    with pytest.raises(HplmError, match="toy"):
        report.expect_success("requests to toy")
