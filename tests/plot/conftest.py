"""Tables of tests are not written through to the disk."""

from tests.builder.conftest import no_waiting_for_the_disk  # noqa: F401
