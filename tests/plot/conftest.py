"""Tables of tests are small, and not synced."""

from tests.builder.conftest import light_work  # noqa: F401
