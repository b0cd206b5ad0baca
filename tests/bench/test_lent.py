"""A shared server that ends while it loads or unloads models is started again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from builder.publish.model_configs import ServingOptions
from testing.random_repository import write
from testing.random_store import TOY
from tests.support.lent import loading
from tests.support.servers import Lease


def _kill(server: Lease) -> None:
    assert server.server.pid is not None
    os.kill(server.server.pid, signal.SIGKILL)
    server.server.wait()


@pytest.mark.slow
@pytest.mark.server("bare")
def test_a_lent_server_that_ends_is_started_again(tmp_path: Path, server: Lease) -> None:
    write(tmp_path, TOY, 1, ServingOptions(threads=1))
    _kill(server)
    with pytest.warns(UserWarning, match="'bare' is started again, because it loads no model"), loading(server, tmp_path):
        assert server.stock().client.is_model_ready("toy")
    with pytest.warns(UserWarning, match="'bare' is started again, because it unloads no model"), loading(server, tmp_path):
        _kill(server)
    client = server.stock().client
    assert client.is_model_ready("says") and not client.is_model_ready("toy")
