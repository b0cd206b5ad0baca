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

from bench.curves import Curve, draw
from bench.machine import in_words
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
HEAD = """\
# hPLMs beside dedicated models: measurements

HMI's workloads (7.2-7.4). All schemes serve the same tenants on the same Triton, one scheme after the other. Weights are
random, because speed and memory do not depend on them. `python -m research.comparison.report` makes the page from the
numbers in `results/`. GFLOP/s are bare matrix products before and after a number: where they differ, the machine had other
work.
"""
TITLES = {  # with what is measured
    "saturate": (
        "Throughput", "Fig. 11, Table 2", "requests answered a second, by tenants",
        "Clients send a request when the last one is answered, for any of the tenants.",
    ),
    "slowdown": (
        "What swapping models costs", "Fig. 3", "slow-down, by tenants",
        "One client sends a request when the last one is answered. The slow-down is the mean time of a request over that with "
        "the fewest tenants.",
    ),
    "steady": (
        "Response time", "Fig. 12", "median response time in ms, by tenants",
        "Every tenant sends a request each 20 s. Time counts from the moment a request is due.",
    ),
    "burst": (
        "Response times under a burst", "Fig. 13", "share of requests answered, by ms since they were due",
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


def draw_results(results: Results, to: Path) -> list[Path]:
    """Draws a chart of the scenario, or of each number of tenants in a burst: a curve for each scheme."""
    scenario, name, size = results.settings()["scenario"], results.folder.name, _size(results)
    title, _, label, _ = TITLES[scenario]
    charts: dict[Path, dict[str, dict[str, Curve]]] = {}  # by path, title and scheme
    fewest: dict[str, float] = {}
    for scheme, tenants, one in _ordered(results):
        if scheme not in COMPARED:
            continue
        rate = one["req_per_s"]
        path, of = to / f"{name}.svg", f"{label}: {size}"
        if scenario == "burst":
            path, of = to / f"{name}-{tenants}.svg", f"{label}: {size}, {tenants:,} tenants"
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
    found = [Results(path.parent) for path in results.glob("*/settings.json")]
    found.sort(key=lambda one: (SCENARIOS.index(one.settings()["scenario"]), one.folder.name))
    if not found:
        raise InvalidInput(f"{results} holds no results: measure some with `python -m research.comparison.compare`")
    machines = dict.fromkeys(f"Machine: {in_words(one.settings()['machine'])}." for one in found)
    page = [HEAD.strip(), *machines]
    for one in found:
        page += [described(one), *(f"![{picture.stem}]({picture.name})" for picture in draw_results(one, to))]
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
