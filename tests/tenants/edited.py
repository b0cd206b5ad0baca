"""A file of a snapshot that was edited by hand, or damaged."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def edited(path: Path, tenant_id: str) -> Iterator[dict]:
    """Yields a tenant of the file, and then writes the file with the changes that were made to it."""
    stored = json.loads(path.read_text())
    yield next(tenant for tenant in stored["tenants"] if tenant["id"] == tenant_id)
    path.write_text(json.dumps(stored))
