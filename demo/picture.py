"""The picture of a demo: accuracy and latency of each tenant, and what each part takes on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from builder.pictures import GRID, INK, OTHERS, OWN, save
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
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.2), layout="constrained")
    right, size, latency = figure.subplots(1, 3)
    bars = size.barh(list(sizes), list(sizes.values()), 0.6, color=[OWN, OWN, OWN, OTHERS[0]])
    size.bar_label(bars, fmt="%.2f", padding=3)
    size.set_xscale("log")
    for axes, own, other in (
        (
            right,
            ("tenant", [score.accuracy for score in scores]),
            ("most frequent label", [score.tenant.majority_share for score in scores]),
        ),
        (latency, ("HTTP", [score.http_ms for score in scores]), ("gRPC", [score.grpc_ms for score in scores])),
    ):
        for shift, color, (label, values) in ((-0.2, OWN, own), (0.2, OTHERS[1], other)):
            axes.barh([place + shift for place in range(len(scores))], values, 0.38, color=color, label=label)
        axes.set_yticks(range(len(scores)), [score.tenant.id for score in scores])
        axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=2)
    titles = ("share of right answers", "megabytes", "milliseconds to an answer, median")
    for axes, title in zip((right, size, latency), titles, strict=True):
        axes.set_title(title, loc="left", color=INK, fontsize=10)
        axes.invert_yaxis()
        axes.grid(axis="x", color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)
