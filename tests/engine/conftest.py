"""Random runs log nothing."""

import logging

import pytest


@pytest.fixture
def nothing_is_logged():
    """pytest keeps logged errors. Their tracebacks hold requests, which nothing may hold at the end."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
