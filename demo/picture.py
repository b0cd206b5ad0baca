"""The picture of a demo: accuracy and latency of each tenant, and what each part takes on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from bench.curves import draw_bars
from builder.store.store import Store
from demo.serving import Score


def megabytes(store: Store, scores: Sequence[Score]) -> dict[str, float]:
    """Returns the sizes of the parts of the store, and of the whole model that they come from."""
    upper, lower = store.folder / "upper.safetensors", store.folder / "lower" / "root-1.safetensors"
    tenants = [file for score in scores for file in store.tenant_folder(score.tenant.id, 1).glob("*.safetensors")]
    tables = [file for domain, version in store.domains() for file in store.table_folder(domain, version).iterdir()]
    parts = {
        "a tenant's adapter and head": (tenants, len(scores)),
        "a table of n-grams, average": (tables, len(store.domains())),
        "the upper half, shared by all": ([upper], 1),
        "a whole model": ([upper, lower], 1),
    }
    return {name: sum(file.stat().st_size for file in files) / 1e6 / count for name, (files, count) in parts.items()}


def draw(scores: Sequence[Score], sizes: dict[str, float], path: Path) -> None:
    def by_tenant(value: Callable[[Score], float]) -> dict[str, float]:
        return {score.tenant.id: value(score) for score in scores}

    panels = {
        "share of right answers": {
            "tenant": by_tenant(lambda score: score.accuracy),
            "most frequent label": by_tenant(lambda score: score.tenant.majority_share),
        },
        "megabytes": {"": sizes},
        "milliseconds to an answer, median": {
            "HTTP": by_tenant(lambda score: score.http_ms),
            "gRPC": by_tenant(lambda score: score.grpc_ms),
        },
    }
    draw_bars(panels, path, log=True)
