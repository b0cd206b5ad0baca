"""Tables and charts of stored results; nothing is measured here.

    python -m research.comparison.report --results results --to my-report

`--results` holds what `research.comparison.compare` left there. The numbers are copied beside the page.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.curves import Curve, draw
from bench.machine import in_words
from bench.run import app_of
from hplm.errors import InvalidInput
from research.options import run
from research.result_file import ResultFile

app = app_of("python -m research.comparison.report", __doc__)
TARGETS, MANY = {"hplm_to_inprocess": 4.0}, 1000  # at least these, for so many tenants or more
NAMES = {
    "hplm": "hPLM", "adapter": "adapters, no tables", "shared": "one shared BERT",
    "dedicated": "dedicated, Triton's model control", "dedicated_inprocess": "dedicated, one process",
    "compressed": "compressed, one process",
}  # fmt: skip
ORDER = list(NAMES)  # the third was measured up to commit 82797dff
HEAD = """\
# hPLMs beside dedicated models: measurements

HMI's workloads (7.2-7.4). All schemes serve the same tenants on the same Triton, one scheme after the other. Weights are
random, because speed and memory do not depend on them. `python -m research.comparison.report` makes the page from the
numbers in `results/`. GFLOP/s are bare matrix products before and after a number: where they differ, the machine had other
work.
"""
TITLES = {
    "saturate": "Throughput (Fig. 11, Table 2): requests answered a second, by tenants",
    "slowdown": "What swapping models costs (Fig. 3): slow-down over the fewest tenants, by tenants",
    "steady": "Response time (Fig. 12): median in ms since a request was due, by tenants",
    "burst": "Response times under a burst (Fig. 13): share of requests answered, by ms since they were due",
}
SCENARIOS = tuple(TITLES)


@dataclass(frozen=True)
class Numbers:
    """The numbers of a scenario that were measured with the same settings on the same machine."""

    settings: dict[str, Any]
    found: list[tuple[str, int, dict[str, Any]]]  # schemes and tenants, in order, and what was measured

    @property
    def name(self) -> str:
        return f"{self.settings['size']}-{self.settings['scenario']}"


def numbers_in(file: ResultFile) -> list[Numbers]:
    every = sorted(file, key=lambda one: (ORDER.index(one.run["scheme"]), one.run["tenants"]))
    found: dict[str, Numbers] = {}
    for case, measured in every:
        settings = case["settings"]
        numbers = found.setdefault(json.dumps(settings, sort_keys=True), Numbers(settings, []))
        numbers.found.append((case["scheme"], case["tenants"], measured))
    return list(found.values())


def summary(results: Numbers) -> dict:
    rates: dict[str, dict[str, float]] = {}
    memory: dict[str, dict] = {}
    p50: dict[str, dict[str, float | None]] = {}
    speeds: list[float] = []
    for scheme, tenants, measured in results.found:
        rates.setdefault(scheme, {})[str(tenants)] = measured["req_per_s"]
        p50.setdefault(scheme, {})[str(tenants)] = measured["p50_ms"]
        kept = {f"{name}_mb": round(measured[name], 2) for name in ("shared", "each", "swapped", "mapped")}
        memory.setdefault(scheme, kept | {"models_in_16_gb": measured["models_in_16_gb"], "private_mb": {}})
        memory[scheme]["private_mb"][str(tenants)] = measured["private_mb"]
        speeds += measured["machine_gflops"]
    settings = results.settings
    ratios = _ratios(rates) if settings["scenario"] == "saturate" else {}
    targets = TARGETS if ratios and max(map(int, rates["hplm"])) >= MANY else {}
    return {
        "schemes": rates,
        "p50_ms": p50,
        "memory": memory,
        "ratios": ratios,
        "targets": targets,
        "missed": [name for name, least in targets.items() if (ratios[name] or 0.0) < least],
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
        "hplm_to_inprocess": ratio("dedicated_inprocess", most),
        "hplm_most_to_least_tenants": round(rates["hplm"][most] / rates["hplm"][least], 3) if rates["hplm"][least] else None,
    }


def described(results: Numbers) -> str:
    """Returns the settings and the tables of a scenario, in Markdown."""
    settings, found = results.settings, summary(results)
    about = {name: value for name, value in settings.items() if name not in ("scenario", "size", "machine")}
    setup = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in about.items())
    parts = [f"## {settings['size']}: {TITLES[settings['scenario']]}", f"Settings: {setup}.", _numbers(results)]
    if settings["scenario"] == "saturate":
        ratios = [(name, value, found["targets"].get(name)) for name, value in found["ratios"].items()]
        parts += [_memory(found["memory"]), _table(("ratio", "found", "target"), ratios)]
    return "\n\n".join(parts)


def _numbers(results: Numbers) -> str:
    rows, fewest = [], {}
    for scheme, tenants, one in results.found:
        rate = one["req_per_s"]
        slower = f"{fewest.setdefault(scheme, rate) / rate:.2f}" if rate and not one["offered"] else ""
        answered = f"{one['succeeded'] / one['offered']:.1%}" if one["offered"] else "all"
        speeds = ", ".join(f"{speed:.0f}" for speed in one["machine_gflops"])
        rows.append([NAMES[scheme], tenants, rate, slower, answered, one["p50_ms"], one["p99_ms"], speeds])
    return _table(("", "tenants", "requests a second", "slow-down", "answered", "median, ms", "99 %, ms", "GFLOP/s"), rows)


def _memory(memory: dict[str, dict]) -> str:
    kept = ("shared_mb", "each_mb", "swapped_mb", "mapped_mb", "models_in_16_gb")
    rows = [[NAMES[scheme], *(memory[scheme][name] for name in kept)] for scheme in memory]
    return _table(("weights in MB", "shared", "a model", "swapped", "tables", "models in 16 GB"), rows)


def _table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    shown = [[_cell(value) for value in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [names, ["---"] * len(names), *shown])


def _cell(value: object) -> str:
    if isinstance(value, int | float):
        return f"{value:,.0f}" if value >= 1000 or isinstance(value, int) else f"{value:.4g}"
    return "" if value is None else str(value)


def draw_results(results: Numbers, to: Path) -> list[Path]:
    """Draws a chart of the scenario, or of each number of tenants in a burst: a curve for each scheme."""
    scenario, size = results.settings["scenario"], results.settings["size"]
    title, _, label = TITLES[scenario].partition(": ")
    charts: dict[Path, dict[str, dict[str, Curve]]] = {}  # by path, title and scheme
    fewest: dict[str, float] = {}
    for scheme, tenants, one in results.found:
        rate = one["req_per_s"]
        path, of = to / f"{results.name}.svg", f"{label}: {size}"
        if scenario == "burst":
            path, of = to / f"{results.name}-{tenants}.svg", f"{label}: {size}, {tenants:,} tenants"
            answered = one["succeeded"] / one["offered"] / 100
            curve = {f"{ms:.3f}": percent * answered for percent, ms in enumerate(one["latency_ms"])}
        elif scenario == "slowdown":
            curve = {str(tenants): fewest.setdefault(scheme, rate) / rate} if rate else {}
        else:
            curve = {str(tenants): one["p50_ms"] if scenario == "steady" else rate or None}
        charts.setdefault(path, {}).setdefault(of, {}).setdefault(NAMES[scheme], {}).update(curve)
    for path, curves in charts.items():
        draw(curves, title, path, log="x" if scenario == "burst" else "xy")
    return list(charts)


def make_report(results: Path, to: Path) -> list[str]:
    """Writes the page with its charts, and copies the results. Returns the names of the scenarios."""
    found = [one for path in sorted(results.glob("*.jsonl")) for one in numbers_in(ResultFile(path))]
    found.sort(key=lambda one: (SCENARIOS.index(one.settings["scenario"]), one.name))
    if not found:
        raise InvalidInput(f"{results} holds no results: measure some with `python -m research.comparison.compare`")
    machines = dict.fromkeys(f"Machine: {in_words(one.settings['machine'])}." for one in found)
    page = [HEAD.strip(), *machines]
    for one in found:
        page += [described(one), *(f"![{picture.stem}]({picture.name})" for picture in draw_results(one, to))]
    (to / "README.md").write_text("\n\n".join(page) + "\n", "utf-8")
    if (to / "results").resolve() != results.resolve():
        shutil.rmtree(to / "results", ignore_errors=True)
        shutil.copytree(results, to / "results", ignore=shutil.ignore_patterns("*.writing"))
    return [one.name for one in found]


@app.default
def report(*, results: Path = Path("results"), to: Path) -> None:
    """Writes the page.

    :param results: folder with the numbers
    :param to: folder of the page, which is replaced
    """
    print(f"{to / 'README.md'}: {', '.join(make_report(results, to))}")


if __name__ == "__main__":
    sys.exit(run(app))
