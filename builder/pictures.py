"""All pictures, and how they are written: the same figures give the same bytes. The suffix of a path decides the format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hplm.errors import InvalidInput

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from builder.evaluation.evaluation import Evaluation
    from builder.store.store import TenantVersion
    from hplm.placement.attained import Attained
    from hplm.placement.cluster import Cluster
    from hplm.placement.placement import Placement

INK, GRID = "#333333", "#dddddd"
OWN = "#1b6ca8"
OTHERS = ("#d1495b", "#e09f3e", "#5b8e7d", "#8d6a9f")
FORMATS = (".png", ".svg", ".pdf")
FONTS = ["DejaVu Sans", "Verdana", "Arial"]  # a reader without the first one sees the next
DASHED = (0, (4, 3))
MOST_NAMED = 6  # units of a group, in the picture of a placement
MOST_LABELS, MOST_NUMBERED = 60, 20  # of a confusion table that can be read, and whose cells have numbers


def check_picture(path: Path) -> None:
    """Refuses a file name whose format is not known, and a folder. Call it before anything is computed."""
    if path.suffix.lower() not in FORMATS or path.is_dir():
        raise InvalidInput(f"--picture {path}: give the name of a file that ends in {', '.join(FORMATS)}")


def panels(width: float, height: float, columns: int = 1, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """Returns a figure of so many inches with panels side by side, each with a grid."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    found = list(figure.subplots(rows, columns, squeeze=False).ravel())
    for axes in found:
        axes.grid(color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, found


def save(figure: Figure, path: Path) -> None:
    """Writes a picture. An SVG has text as text, which keeps it small, and no date."""
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else None
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "hplm", "font.sans-serif": FONTS}):
        figure.savefig(path, metadata=metadata)


def draw_learning(report: dict[str, Any], metric: str, title: str, path: Path) -> None:
    """Draws the curve and the exams of a report (`Progress.reported`). `metric`: the name of the score."""
    exams, (figure, (losses, scores)) = report["exams"], panels(8, 4.2, 2)
    losses.plot(*zip(*report["curve"], strict=True), color=OTHERS[0], label="training")
    steps = [exam["step"] for exam in exams]
    losses.plot(steps, [exam["loss"] for exam in exams], color=OWN, marker="o", label="dev")
    losses.set_ylabel("loss")
    losses.legend(frameon=False)
    scores.plot(steps, [exam["score"] for exam in exams], color=OWN, marker="o")
    scores.axvline(report["kept_step"], color=INK, linewidth=1, linestyle=DASHED)
    scores.set_ylabel(f"dev {metric}")
    for axes in (losses, scores):
        axes.set_xlabel("step")
    figure.suptitle(title, x=0.01, ha="left", color=INK, parse_math=False)  # a folder's name may contain two dollar signs
    save(figure, path)


def check_confusion(tenant: TenantVersion) -> None:
    """Refuses tenants whose labels no `draw_confusion` can show. Call it before anything is computed."""
    from builder.tasks.tasks import TRAINING_TASKS, training_task

    if not training_task(tenant.task).one_label_a_row or len(tenant.labels) > MOST_LABELS:
        able = " and ".join(name for name, task in TRAINING_TASKS.items() if task.one_label_a_row)
        raise InvalidInput(
            f"--picture shows right against answered labels, for {able} with up to "
            f"{MOST_LABELS} labels; tenant {tenant.id!r} has the task {tenant.task} and {len(tenant.labels)}"
        )


def draw_confusion(evaluation: Evaluation, path: Path) -> None:
    """Draws right labels against answered labels, as shares of the right label."""
    import numpy as np

    from builder.tasks.scores import confusion

    tenant = evaluation.tenant
    counts = confusion(evaluation.texts.examples, evaluation.answers)
    pairs = np.array([[counts.get(right, {}).get(one, 0) for one in (*tenant.labels, "")] for right in tenant.labels])
    answers = [*tenant.labels, "(none)"] if pairs[:, -1].any() else list(tenant.labels)
    pairs = pairs[:, : len(answers)]
    shares = pairs / pairs.sum(1, keepdims=True).clip(1)
    size = 2.5 + 0.32 * min(len(tenant.labels), 40)
    figure, (axes,) = panels(size + 1, size)
    axes.grid(False)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(answers)), answers, rotation=90, parse_math=False)  # a label may contain two dollar signs
    axes.set_yticks(range(len(tenant.labels)), tenant.labels, parse_math=False)
    if len(tenant.labels) <= MOST_NUMBERED:
        for (row, column), count in ((at, pairs[at]) for at in zip(*pairs.nonzero(), strict=True)):
            color = "white" if shares[row, column] > 0.5 else INK
            axes.text(column, row, f"{count:,}", ha="center", va="center", color=color, fontsize=8)
    axes.set_xlabel("answered")
    axes.set_ylabel("right")
    axes.set_title(f"{tenant.id} version {tenant.version}", loc="left", color=INK)
    figure.colorbar(image, ax=axes, label="share of the right label")
    save(figure, path)


def draw_exits(report: dict[str, Any], path: Path) -> None:
    """Draws what the plans of a tenant's exits lose, against the work that they leave."""
    plans, (figure, (axes,)) = report["plans"], panels(5.2, 4.2)
    cost = [plan["cost"] for plan in plans]
    expected, off = ([plan[name] for plan in plans] for name in ("expected_loss", "expected_loss_off"))
    axes.errorbar(cost, expected, off, fmt="o-", color=OWN, label=f"expected, from {report['texts']:,} texts")
    if all(plan.get("lost") for plan in plans):
        lost = [plan["lost"] for plan in plans]
        points, off = ([one[name] for one in lost] for name in ("points", "off"))
        axes.errorbar(cost, points, off, fmt="s--", color=OTHERS[0], label="by their labels")
    axes.set(xlim=(0, 1), xlabel="work of the layers, share of the full stack's", ylabel="points lost")
    axes.legend()
    axes.set_title(f"{report['tenant']} version {report['version']}: exits", loc="left", color=INK)
    save(figure, path)


def draw_placement(placement: Placement, cluster: Cluster, attained: Attained, path: Path) -> None:
    """Draws a row for each machine and a box for each device; the devices of a group have one colour and one text."""
    rows = max(1, len(cluster.machines))
    figure, (axes,) = panels(12, 1.6 + 1.3 * rows)
    colors = (OWN, *OTHERS)
    for row, machine in enumerate(cluster.machines):
        column = {device.name: i for i, device in enumerate(machine.devices)}
        axes.text(-0.2, row + 0.45, machine.name, ha="right", va="center", color=INK)
        for i, group in enumerate(placement.groups):
            if group.machine != machine.name:
                continue
            for stage in range(group.stages):
                for device in group.devices_of(stage):
                    faded = 1 - 0.6 * stage / group.stages
                    axes.bar(column[device] + 0.5, 0.9, 0.94, row, color=colors[i % len(colors)], alpha=faded)
            busy = attained.busy_ns[i] / attained.trace.seconds / 1e9 if i < len(attained.busy_ns) else 0.0
            named = ", ".join(group.units[:MOST_NAMED]) + (" ..." if len(group.units) > MOST_NAMED else "")
            label = f"{group.name}, {group.stages} x {group.intra}, {busy:.0%} busy\n{named}"
            axes.text(column[group.devices[0]] + 0.1, row + 0.45, label, va="center", fontsize=7, color="white", clip_on=True)
    axes.set_title(f"{attained.share:.1%} of {len(attained.trace):,} requests in time ({attained.trace.source})", loc="left")
    axes.set_xlim(-1.5, max(len(machine.devices) for machine in cluster.machines))
    axes.set_ylim(rows, 0)
    axes.axis("off")
    save(figure, path)
