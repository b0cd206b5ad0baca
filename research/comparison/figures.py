"""The papers' figures from result files, as pictures and a page of text; nothing is measured here.

    python -m research.comparison.figures --results results --to research/report

`--results` holds what `research.comparison.compare` left there and, where they exist, `pipeline.json` (the line of
`hplm bench pipeline --json`) and `timeline.json` (a list of [thread, name, start, end]). All of it is copied beside the page,
so that the page can be made again: `--results research/report/results`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from bench.machine import in_words
from bench.tools.thread_spans import chrome_trace, read_spans, threads_of, window
from hplm.errors import HplmError, InvalidInput
from research.comparison import page, pictures
from research.comparison.compare import SCENARIOS, summary
from research.comparison.results import Results
from research.comparison.served_schemes import COMPARED, DISK
from research.schemes.export import WHOLE

SIZES_IN_WORDS = {"bert-base": "BERT-base (6 + 6 layers, width 768)", "minilm": "MiniLM (3 + 3 layers, width 384)"}
OVERLAPS_IN_WORDS = {
    "pipelined": "everything ahead",
    "coarse_swapping": "adapters copied by batch, not by layer",
    "no_retrieval": "without pipelined retrieval",
    "no_swapping": "without pipelined adapter swapping",
    "synchronous": "nothing ahead",
}


def make_report(results: Path, to: Path) -> list[str]:
    """The names of the sections that could be made."""
    scenarios = [path.parent for path in results.glob("*/settings.json")]
    scenarios.sort(key=lambda folder: (SCENARIOS.index(folder.name.rpartition("-")[2]), folder.name))
    sections = [_of_scenario(Results(folder), to) for folder in scenarios]
    sections += [
        make(results / name, to)
        for name, make in (("pipeline.json", _pipeline), ("timeline.json", _timeline))
        if (results / name).exists()
    ]
    if not sections:
        command = f"python -m research.comparison.compare --results {results}"
        raise InvalidInput(f"{results} holds no results: measure some with `{command}`")
    machines = dict.fromkeys(in_words(Results(folder).settings()["machine"]) for folder in scenarios)
    head = page.HEAD.substitute(machines="\n".join(textwrap.fill(f"Machine: {machine}.", 100) for machine in machines))
    to.mkdir(parents=True, exist_ok=True)
    (to / "README.md").write_text(head + "".join(text for _, text in sections), "utf-8")
    if (to / "results").resolve() != results.resolve():
        shutil.rmtree(to / "results", ignore_errors=True)
        shutil.copytree(results, to / "results", ignore=shutil.ignore_patterns("*.writing"))
    return [name for name, _ in sections]


def _of_scenario(results: Results, to: Path) -> tuple[str, str]:
    scenario = results.settings()["scenario"]
    return {"saturate": _saturate, "slowdown": _slowdown, "steady": _steady, "burst": _burst}[scenario](results, to)


def _saturate(results: Results, to: Path) -> tuple[str, str]:
    settings, figures = results.settings(), summary(results)
    name, size = results.folder.name, _size(results)
    rates = figures["schemes"]
    curves = {scheme: [(int(n), rate) for n, rate in found.items() if rate] for scheme, found in rates.items()}
    pictures.over_tenants(to / f"{name}.png", curves, f"Throughput: {size}, {_lengths(settings)}", "requests answered a second")
    memory = figures["memory"]
    rows = [
        (pictures.NAMES[scheme], memory[scheme]["each_mb"] or memory[scheme]["swapped_mb"], _said(memory[scheme]))
        for scheme in COMPARED
        if scheme in memory and scheme != DISK
    ]
    colours = [pictures.COLOURS[scheme] for scheme in COMPARED if scheme in memory and scheme != DISK]
    title = f"One model more: {size}"
    pictures.bars(to / f"{name}-memory.png", rows, title, "MB of weights, logarithmic", colours, log=True)
    text = page.SATURATE.substitute(
        size=size,
        name=name,
        connections=settings["connections"],
        lengths=_lengths(settings),
        budget=settings["setup"]["budget"],
        seconds=f"{settings['seconds']:g}",
        table=_table(figures["schemes"], "requests a second"),
        speeds="{least:g} to {most:g}, median {median:g}".format(**figures["machine_gflops"]),
        ratios="\n".join(_ratio_lines(figures)),
        memory=_memory_table(memory),
    )
    return name, text


def _slowdown(results: Results, to: Path) -> tuple[str, str]:
    settings, rates = results.settings(), summary(results)["schemes"]
    name, size, budget = results.folder.name, _size(results), settings["setup"]["budget"]
    curves: dict[str, list[tuple[int, float]]] = {}
    lines = ["| | tenants | not in memory | a request, ms | slow-down |", "|---|---|---|---|---|"]
    for scheme in (scheme for scheme in COMPARED if scheme in rates):
        found = sorted((int(count), rate) for count, rate in rates[scheme].items() if rate)
        for count, rate in found:
            elsewhere = max(0.0, 1 - budget / count) if scheme in (*WHOLE, DISK) else 0.0
            slower = found[0][1] / rate
            curves.setdefault(scheme, []).append((count, slower))
            cells = [f"{count:,}", f"{elsewhere:.0%}", f"{1000 / rate:,.1f}", f"{slower:.2f}"]
            lines.append(f"| {pictures.NAMES[scheme]} | {' | '.join(cells)} |")
    pictures.over_tenants(to / f"{name}.png", curves, f"Slow-down by swapping models: {size}", "slow-down")
    lengths, seconds = _lengths(settings), f"{settings['seconds']:g}"
    text = page.SLOWDOWN.substitute(
        size=size, name=name, lengths=lengths, budget=budget, seconds=seconds, table="\n".join(lines)
    )
    return name, text


def _steady(results: Results, to: Path) -> tuple[str, str]:
    settings, figures = results.settings(), summary(results)
    name, size = results.folder.name, _size(results)
    curves = {scheme: [(int(n), ms) for n, ms in found.items() if ms] for scheme, found in figures["p50_ms"].items()}
    title = f"Response time, one request per tenant in 20 s: {size}"
    pictures.over_tenants(to / f"{name}.png", curves, title, "median response time, ms")
    text = page.STEADY.substitute(
        size=size,
        name=name,
        lengths=_lengths(settings),
        seconds=f"{settings['seconds']:g}",
        patience=f"{settings['patience']:g}",
        table=_answered_table(results),
    )
    return name, text


def _burst(results: Results, to: Path) -> tuple[str, str]:
    settings, name, size = results.settings(), results.folder.name, _size(results)
    texts = []
    for tenants in sorted({tenants for _, tenants, _ in results.all()}):
        curves = {
            scheme: [
                (ms, percent / 100 * measured["succeeded"] / measured["offered"])
                for percent, ms in enumerate(measured["latency_ms"])
            ]
            for scheme, count, measured in results.all()
            if count == tenants and measured["latency_ms"]
        }
        picture = f"{name}-{tenants}.png"
        pictures.distribution(to / picture, curves, f"A burst, {tenants:,} tenants: {size}, {_lengths(settings)}")
        texts.append(f"![Response times under a burst, {tenants} tenants]({picture})")
    text = page.BURST.substitute(
        size=size,
        pictures="\n\n".join(texts),
        lengths=_lengths(settings),
        seconds=f"{settings['seconds']:g}",
        patience=f"{settings['patience']:g}",
        table=_answered_table(results),
    )
    return name, text


def _pipeline(path: Path, to: Path) -> tuple[str, str]:
    figures = json.loads(path.read_text("utf-8"))
    names = [name for name in OVERLAPS_IN_WORDS if name in figures]
    base, case = figures["synchronous"], figures["case"]
    words, noise = OVERLAPS_IN_WORDS, ""
    if figures.get("device", "cpu") == "cpu" and "coarse_swapping" in figures:  # old results have no device: a CPU's
        words = {**words, "coarse_swapping": "everything ahead, measured again"}
        noise = page.SAME_ON_CPU.substitute(share=f"{abs(figures['pipelined'] / figures['coarse_swapping'] - 1):.1%}")
    rows = [(words[name], figures[name], f"{figures[name]:.1f}  ({figures[name] / base:.2f} x)") for name in names]
    colours = [pictures.KINDS[0] if name == "pipelined" else "#8c8c8c" for name in names]
    title = "What is made ready while a batch computes"
    pictures.bars(to / "pipeline.png", rows, title, "requests a second", colours, log=False)
    text = page.PIPELINE.substitute(
        case=f"{case['size']}, {case['tokens']} tokens, {case['tenants']} tenants in {case['slots']} slots",
        noise=noise,
        rows="\n".join(f"| {said} | {rate:.1f} | {rate / base:.2f} |" for said, rate, _ in rows),
    )
    return "pipeline", text


def _timeline(path: Path, to: Path) -> tuple[str, str]:
    spans = read_spans(path)
    to.mkdir(parents=True, exist_ok=True)
    (to / "timeline-trace.json").write_text(json.dumps(chrome_trace(spans)) + "\n", "utf-8")
    title = "What each thread of the pipeline does: the next batch is made ready while one computes"
    pictures.lanes(to / "timeline.png", window(spans), threads_of(spans), title)
    return "timeline", page.TIMELINE


def _size(results: Results) -> str:
    name = results.folder.name.rpartition("-")[0]
    return SIZES_IN_WORDS.get(name, name)


def _lengths(settings: dict) -> str:
    lengths = settings["lengths"]
    if lengths.isdecimal():
        return f"{lengths} tokens"
    mean, variance, *_ = lengths.partition(":")[2].split(",")
    return f"lengths normal, mean {mean}, variance {variance}"


def _said(memory: dict) -> str:
    size = memory["each_mb"] or memory["swapped_mb"]
    return f"{size:.3g} MB, {memory['models_in_16_gb']:,} models in 16 GB"


def _table(rates: dict[str, dict[str, float]], what: str) -> str:
    counts = sorted({int(count) for found in rates.values() for count in found})
    lines = [f"| {what} | " + " | ".join(f"{count:,}" for count in counts) + " |", "|---" * (len(counts) + 1) + "|"]
    for scheme in (scheme for scheme in COMPARED if scheme in rates):
        cells = [f"{rates[scheme][str(count)]:.2f}" if str(count) in rates[scheme] else "" for count in counts]
        lines.append(f"| {pictures.NAMES[scheme]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _memory_table(memory: dict[str, dict]) -> str:
    lines = ["| MB | shared | a model | swapped | tables | models in 16 GB |", "|---|---|---|---|---|---|"]
    for scheme in (scheme for scheme in COMPARED if scheme in memory and scheme != DISK):
        one = memory[scheme]
        cells = [f"{one[f'{name}_mb']:,.4g}" for name in ("shared", "each", "swapped", "mapped")]
        lines.append(f"| {pictures.NAMES[scheme]} | " + " | ".join(cells) + f" | {one['models_in_16_gb']:,} |")
    return "\n".join(lines)


def _answered_table(results: Results) -> str:
    lines = ["| | tenants | offered req/s | answered | median, ms | 99 %, ms | GFLOP/s |", "|---|---|---|---|---|---|---|"]
    found = {(scheme, tenants): measured for scheme, tenants, measured in results.all()}
    for scheme, tenants in sorted(found, key=lambda one: (one[1], COMPARED.index(one[0]))):
        one = found[scheme, tenants]
        times = [f"{one[name]:,.0f}" if one[name] is not None else "" for name in ("p50_ms", "p99_ms")]
        answered, speed = f"{one['succeeded'] / one['offered']:.1%}", ", ".join(f"{own:.0f}" for own in one["machine_gflops"])
        cells = [f"{tenants:,}", f"{one['offered_req_per_s']:.1f}", answered, *times, speed]
        lines.append(f"| {pictures.NAMES[scheme]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio_lines(figures: dict) -> list[str]:
    lines = []
    for name, value in figures["ratios"].items():
        if value is not None:
            target = figures["targets"].get(name)
            lines.append(f"- {page.RATIOS[name]}: **{value:g} x**" + (f" (target: {target:g} x)" if target else ""))
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="research.comparison.figures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=Path("results"), help="default: %(default)s")
    parser.add_argument("--to", type=Path, default=Path("research/report"), help="default: %(default)s")
    given = parser.parse_args(arguments)
    try:
        sections = make_report(given.results, given.to)
    except HplmError as error:
        sys.exit(str(error))
    print(f"{given.to / 'README.md'}: {', '.join(sections)}")


if __name__ == "__main__":
    main()
