"""Tables and charts of stored results; nothing is measured here.

    python -m research.comparison.report --results results --to my-report

`--results` holds what `research.comparison.compare` left there. The numbers are copied beside the page.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.machine import in_words
from builder.pictures import GRID, INK, OTHERS, OWN, save
from hplm.errors import HplmError, InvalidInput
from research.comparison.results import Results
from research.comparison.schemes import COMPARED

SCENARIOS = ("saturate", "slowdown", "steady", "burst")
TARGETS = {"hplm_to_dedicated_at_least_tenants": 1.8, "hplm_to_dedicated_at_most_tenants": 100.0, "hplm_to_inprocess": 4.0}
NAMES = {
    "hplm": "hPLM", "adapter": "adapters, no tables", "shared": "one shared BERT",
    "dedicated": "dedicated, Triton's model control", "dedicated_inprocess": "dedicated, one process",
    "compressed": "compressed, one process",
}  # fmt: skip
COLOURS: dict[str, str] = dict(
    zip(("hplm", "dedicated", "dedicated_inprocess", "adapter", "compressed"), (OWN, *OTHERS), strict=True)
)
HEAD = """\
# hPLMs beside dedicated models: measurements

HMI's workloads (7.2-7.4). All schemes serve the same tenants on the same Triton, one scheme after the other. Weights are
random, because speed and memory do not depend on them. `python -m research.comparison.report` makes the page from the
numbers in `results/`. GFLOP/s are bare matrix products before and after a number: where they differ, the machine had other
work.
"""
TITLES = {  # with what is measured
    "saturate": (
        "Throughput", "Fig. 11, Table 2", "requests answered a second",
        "Clients send a request when the last one is answered, for any of the tenants.",
    ),
    "slowdown": (
        "What swapping models costs", "Fig. 3", "slow-down",
        "One client sends a request when the last one is answered. The slow-down is the mean time of a request over that with "
        "the fewest tenants.",
    ),
    "steady": (
        "Response time", "Fig. 12", "median response time, ms",
        "Every tenant sends a request each 20 s. Time counts from the moment a request is due.",
    ),
    "burst": (
        "Response times under a burst", "Fig. 13", "share of the requests answered by then",
        "250 users start, one every 0.05 s. Each sends a request every 1.2 s, even if the last one is not answered. A curve "
        "below 100 % has unanswered requests; median and 99 % leave these out.",
    ),
}  # fmt: skip


def summary(results: Results) -> dict:
    rates: dict[str, dict[str, float]] = {}
    memory: dict[str, dict] = {}
    p50: dict[str, dict[str, float | None]] = {}
    speeds: list[float] = []
    for scheme, tenants, measured in results.all():
        rates.setdefault(scheme, {})[str(tenants)] = measured["req_per_s"]
        p50.setdefault(scheme, {})[str(tenants)] = measured["p50_ms"]
        kept = {f"{name}_mb": round(measured[name], 2) for name in ("shared", "each", "swapped", "mapped")}
        memory.setdefault(scheme, kept | {"models_in_16_gb": measured["models_in_16_gb"], "private_mb": {}})
        memory[scheme]["private_mb"][str(tenants)] = measured["private_mb"]
        speeds += measured["machine_gflops"]
    settings = results.settings()
    return {
        "schemes": rates,
        "p50_ms": p50,
        "memory": memory,
        "ratios": _ratios(rates) if settings["scenario"] == "saturate" else {},
        "targets": TARGETS,
        "settings": settings,
        "machine_gflops": {"least": min(speeds), "median": statistics.median(speeds), "most": max(speeds)} if speeds else None,
    }


def _ratios(rates: dict[str, dict[str, float]]) -> dict[str, float | None]:
    counts = sorted(map(int, rates.get("hplm", {})))
    if not counts:
        return {}
    least, most = str(counts[0]), str(counts[-1])

    def ratio(over: str, tenants: str) -> float | None:
        below = rates.get(over, {}).get(tenants)
        return round(rates["hplm"][tenants] / below, 2) if below else None

    return {
        "hplm_to_dedicated_at_least_tenants": ratio("dedicated", least),
        "hplm_to_dedicated_at_most_tenants": ratio("dedicated", most),
        "hplm_to_inprocess": ratio("dedicated_inprocess", most),
        "hplm_most_to_least_tenants": round(rates["hplm"][most] / rates["hplm"][least], 3) if rates["hplm"][least] else None,
    }


def described(results: Results) -> str:
    """Returns the settings and the tables of a scenario, in Markdown."""
    settings, found = results.settings(), summary(results)
    title, figures, _, text = TITLES[settings["scenario"]]
    setup = (
        f"Lengths in tokens: {settings['lengths']}; {settings['seconds']:g} s; {settings['connections']} connections; given up "
        f"after {settings['patience']:g} s; memory for {settings['budget']} whole models."
    )
    parts = [f"## {title}, {_size(results)} ({figures})", f"{text} {setup}", _numbers(results)]
    if settings["scenario"] == "saturate":
        ratios = [(name, value, found["targets"].get(name)) for name, value in found["ratios"].items()]
        parts += [_memory(found["memory"]), _table(("ratio", "found", "target"), ratios)]
    return "\n\n".join(parts)


def _numbers(results: Results) -> str:
    rows, fewest = [], {}
    for scheme, tenants, one in _ordered(results):
        rate = one["req_per_s"]
        slower = f"{fewest.setdefault(scheme, rate) / rate:.2f}" if rate and not one["offered"] else ""
        answered = f"{one['succeeded'] / one['offered']:.1%}" if one["offered"] else "all"
        speeds = ", ".join(f"{speed:.0f}" for speed in one["machine_gflops"])
        rows.append([NAMES.get(scheme, scheme), tenants, rate, slower, answered, one["p50_ms"], one["p99_ms"], speeds])
    return _table(("", "tenants", "requests a second", "slow-down", "answered", "median, ms", "99 %, ms", "GFLOP/s"), rows)


def _memory(memory: dict[str, dict]) -> str:
    kept = ("shared_mb", "each_mb", "swapped_mb", "mapped_mb", "models_in_16_gb")
    rows = [[NAMES.get(scheme, scheme), *(memory[scheme][name] for name in kept)] for scheme in sorted(memory, key=_place)]
    return _table(("weights in MB", "shared", "a model", "swapped", "tables", "models in 16 GB"), rows)


def _table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    shown = [[_cell(value) for value in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [names, ["---"] * len(names), *shown])


def _cell(value: object) -> str:
    if isinstance(value, int | float):
        return f"{value:,.0f}" if value >= 1000 or isinstance(value, int) else f"{value:.4g}"
    return "" if value is None else str(value)


def _ordered(results: Results) -> list[tuple[str, int, dict]]:
    return sorted(results.all(), key=lambda one: (_place(one[0]), one[1]))


def _place(scheme: str) -> tuple[int, str]:
    """The place of a scheme in tables. Results of schemes that are no longer served come last."""
    return COMPARED.index(scheme) if scheme in COMPARED else len(COMPARED), scheme


def _size(results: Results) -> str:
    return results.folder.name.rpartition("-")[0]


def draw(results: Results, to: Path) -> list[Path]:
    """Draws a chart of the scenario: a curve of each scheme over the tenants, or, of a burst, over the response times."""
    scenario, name = results.settings()["scenario"], results.folder.name
    title, _, label, _ = TITLES[scenario]
    found = [one for one in _ordered(results) if one[0] in COMPARED]
    if scenario == "burst":
        pictures = []
        for count in sorted({tenants for _, tenants, _ in found}):
            curves = {
                scheme: [
                    (ms, percent / 100 * one["succeeded"] / one["offered"]) for percent, ms in enumerate(one["latency_ms"])
                ]
                for scheme, tenants, one in found
                if tenants == count
            }
            pictures.append(to / f"{name}-{count}.svg")
            _chart(pictures[-1], curves, f"{title}: {_size(results)}, {count:,} tenants", "ms since a request was due", label)
        return pictures
    curves: dict[str, list[tuple[float, float]]] = {}
    for scheme, tenants, one in found:
        value = one["p50_ms"] if scenario == "steady" else one["req_per_s"]
        if value:
            curves.setdefault(scheme, []).append((tenants, value))
    if scenario == "slowdown":
        curves = {scheme: [(tenants, curve[0][1] / rate) for tenants, rate in curve] for scheme, curve in curves.items()}
    _chart(to / f"{name}.svg", curves, f"{title}: {_size(results)}", "tenants", label, log=True)
    return [to / f"{name}.svg"]


def _chart(path: Path, curves: dict[str, list[tuple[float, float]]], title: str, x: str, y: str, log: bool = False) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(8, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for scheme, curve in curves.items():
        width = 2.6 if scheme == "hplm" else 1.7
        marker, color = "o" if log else "", COLOURS.get(scheme, "#8c8c8c")
        axes.plot(*zip(*curve, strict=True), marker=marker, color=color, linewidth=width, label=NAMES.get(scheme, scheme))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, loc="left", color=INK)
    axes.grid(color=GRID, linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside lower center", ncols=3)
    save(figure, path)


def make_report(results: Path, to: Path) -> list[str]:
    """Writes the page with its charts, and copies the results. Returns the names of the scenarios."""
    found = [Results(path.parent) for path in results.glob("*/settings.json")]
    found.sort(key=lambda one: (SCENARIOS.index(one.settings()["scenario"]), one.folder.name))
    if not found:
        raise InvalidInput(f"{results} holds no results: measure some with `python -m research.comparison.compare`")
    machines = dict.fromkeys(f"Machine: {in_words(one.settings()['machine'])}." for one in found)
    page = [HEAD.strip(), *machines]
    for one in found:
        page += [described(one), *(f"![{picture.stem}]({picture.name})" for picture in draw(one, to))]
    (to / "README.md").write_text("\n\n".join(page) + "\n", "utf-8")
    if (to / "results").resolve() != results.resolve():
        shutil.rmtree(to / "results", ignore_errors=True)
        shutil.copytree(results, to / "results", ignore=shutil.ignore_patterns("*.writing"))
    return [one.folder.name for one in found]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="research.comparison.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=Path("results"), help="default: %(default)s")
    parser.add_argument("--to", type=Path, required=True, help="folder of the page, which is replaced")
    given = parser.parse_args(arguments)
    try:
        made = make_report(given.results, given.to)
    except HplmError as error:
        sys.exit(str(error))
    print(f"{given.to / 'README.md'}: {', '.join(made)}")


if __name__ == "__main__":
    main()
