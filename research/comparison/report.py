"""Tables and charts of stored results; nothing is measured here.

    python -m research.comparison.report --results results --to my-report

`--results` holds what `research.comparison.compare` left there. The numbers are copied beside the page.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.curves import Curve, draw
from bench.machine import in_words
from bench.run import app_of
from hplm.errors import InvalidInput
from research.markdown import markdown
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
work."""
TITLES = {
    "saturate": "Throughput (Fig. 11, Table 2): requests answered a second, by tenants",
    "slowdown": "What swapping models costs (Fig. 3): slow-down over the fewest tenants, by tenants",
    "steady": "Response time (Fig. 12): median in ms since a request was due, by tenants",
    "burst": "Response times under a burst (Fig. 13): share of requests answered, by ms since they were due",
}
SCENARIOS = tuple(TITLES)
WEIGHTS = ("shared", "each", "swapped", "mapped")  # megabytes


@dataclass(frozen=True)
class Numbers:
    """The numbers of a scenario that were measured with the same settings on the same machine."""

    settings: dict[str, Any]
    found: list[tuple[str, int, dict[str, Any]]]  # schemes and tenants, in order, and what was measured

    @property
    def name(self) -> str:
        return f"{self.settings['size']}-{self.settings['scenario']}"

    def by_tenants(self, name: str) -> dict[str, dict[str, Any]]:
        """Returns a figure by scheme and number of tenants."""
        found: dict[str, dict[str, Any]] = {}
        for scheme, tenants, one in self.found:
            found.setdefault(scheme, {})[str(tenants)] = one[name]
        return found

    def slower(self) -> dict[str, dict[str, float | None]]:
        """Returns the rate of each scheme with its fewest tenants over that with more."""
        rates = self.by_tenants("req_per_s").items()
        return {scheme: {n: next(iter(own.values())) / one if one else None for n, one in own.items()} for scheme, own in rates}


def numbers_in(file: ResultFile) -> list[Numbers]:
    found: dict[str, Numbers] = {}
    for case, measured in sorted(file, key=lambda one: (ORDER.index(one.run["scheme"]), one.run["tenants"])):
        settings = case["settings"]
        numbers = found.setdefault(json.dumps(settings, sort_keys=True), Numbers(settings, []))
        numbers.found.append((case["scheme"], case["tenants"], measured))
    return list(found.values())


def summary(results: Numbers) -> dict[str, Any]:
    rates, private = results.by_tenants("req_per_s"), results.by_tenants("private_mb")
    memory = {
        scheme: {f"{name}_mb": round(one[name], 2) for name in WEIGHTS}
        | {"models_in_16_gb": one["models_in_16_gb"], "private_mb": private[scheme]}
        for scheme, _, one in results.found  # weights are the same for all numbers of tenants
    }
    ratios, targets = {}, {}
    if results.settings["scenario"] == "saturate" and (own := rates.get("hplm")):
        most, least = list(own)[-1], next(iter(own))
        below = {"hplm_to_inprocess": rates.get("dedicated_inprocess", {}).get(most), "hplm_most_to_least_tenants": own[least]}
        ratios = {name: round(own[most] / rate, 3) if rate else None for name, rate in below.items()}
        targets = TARGETS if int(most) >= MANY else {}
    speeds = [speed for *_, one in results.found for speed in one["machine_gflops"]]
    return {
        "schemes": rates,
        "p50_ms": results.by_tenants("p50_ms"),
        "memory": memory,
        "ratios": ratios,
        "targets": targets,
        "missed": [name for name, least in targets.items() if (ratios[name] or 0.0) < least],
        "settings": results.settings,
        "machine_gflops": {"least": min(speeds), "median": statistics.median(speeds), "most": max(speeds)} if speeds else None,
    }


def described(results: Numbers) -> str:
    """Returns the settings and the tables of a scenario, in Markdown."""
    settings, found, slower = results.settings, summary(results), results.slower()
    about = {name: value for name, value in settings.items() if name not in ("scenario", "size", "machine")}
    setup = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in about.items())
    names = ("", "tenants", "requests a second", "slow-down", "answered", "median, ms", "99 %, ms", "GFLOP/s")
    rows = []
    for scheme, tenants, one in results.found:
        offered, speeds = one["offered"], ", ".join(f"{speed:.0f}" for speed in one["machine_gflops"])
        ratio, answered = (None, f"{one['succeeded'] / offered:.1%}") if offered else (slower[scheme][str(tenants)], "all")
        rows.append([NAMES[scheme], tenants, one["req_per_s"], ratio, answered, one["p50_ms"], one["p99_ms"], speeds])
    parts = [f"## {settings['size']}: {TITLES[settings['scenario']]}", f"Settings: {setup}.", markdown(names, rows)]
    if settings["scenario"] == "saturate":
        kept = (*(f"{name}_mb" for name in WEIGHTS), "models_in_16_gb")
        names = ("weights in MB", "shared", "a model", "swapped", "tables", "models in 16 GB")
        rows = [[NAMES[scheme], *(own[name] for name in kept)] for scheme, own in found["memory"].items()]
        parts.append(markdown(names, rows))
        ratios = [(name, value, found["targets"].get(name)) for name, value in found["ratios"].items()]
        parts.append(markdown(("ratio", "found", "target"), ratios))
    return "\n\n".join(parts)


def draw_results(results: Numbers, to: Path) -> list[Path]:
    """Draws a chart of the scenario, or of each number of tenants in a burst: a curve for each scheme."""
    scenario, size = results.settings["scenario"], results.settings["size"]
    title, _, label = TITLES[scenario].partition(": ")
    charts: dict[tuple[Path, str], dict[str, Curve]] = {}  # by path and title
    if scenario == "burst":
        for scheme, tenants, one in results.found:
            answered = one["succeeded"] / one["offered"] / 100
            chart = charts.setdefault((to / f"{results.name}-{tenants}.svg", f"{label}: {size}, {tenants:,} tenants"), {})
            chart[NAMES[scheme]] = {f"{ms:.3f}": percent * answered for percent, ms in enumerate(one["latency_ms"])}
    else:
        drawn = "p50_ms" if scenario == "steady" else "req_per_s"
        figures = results.slower() if scenario == "slowdown" else results.by_tenants(drawn)
        curves = {NAMES[scheme]: {n: value or None for n, value in own.items()} for scheme, own in figures.items()}
        charts[to / f"{results.name}.svg", f"{label}: {size}"] = curves
    for (path, name), chart in charts.items():
        draw({name: chart}, title, path, log="x" if scenario == "burst" else "xy")
    return [path for path, _ in charts]


def make_report(results: Path, to: Path) -> list[str]:
    """Writes the page with its charts, and copies the results. Returns the names of the scenarios."""
    found = [one for path in sorted(results.glob("*.jsonl")) for one in numbers_in(ResultFile(path))]
    found.sort(key=lambda one: (SCENARIOS.index(one.settings["scenario"]), one.name))
    if not found:
        raise InvalidInput(f"{results} holds no results: measure some with `python -m research.comparison.compare`")
    page = [HEAD, *dict.fromkeys(f"Machine: {in_words(one.settings['machine'])}." for one in found)]
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
