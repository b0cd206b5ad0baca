"""A server behind the front door."""

import pytest

from tests.deploy.door import require_haproxy
from tests.support.servers import serving


@pytest.fixture(scope="module")
def server(toy):
    require_haproxy()
    with serving(toy.repository) as server:
        yield server
