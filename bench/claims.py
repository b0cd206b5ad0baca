"""The claims of the project: each figure with its command, its last result and commit, and whether that is stale.

    python -m bench.claims                      all figures, and which are stale
    python -m bench.claims --run                measures all of them again, in one go, and makes first what they need
    python -m bench.claims --run --only glue    only commands with this word

The claims are in claims.json, the results in docs/figures.json. docs/benchmarks.md and README.md take their figures from it,
between markers.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import msgspec

from bench.turns import gflops
from hplm.errors import HplmError
from hplm.placement.measuring import fingerprint

ROOT = Path(__file__).parents[1]
RESULTS = "docs/figures.json"
WHERE = ("date", "commit", "cpu")
BEGIN, END = "<!-- figures: python -m bench.claims -->", "<!-- end of figures -->"


class Claim(msgspec.Struct, forbid_unknown_fields=True):
    says: str
    target: str = ""  # `at least 0.9` or `at most 5`, if the JSON of the command has none
    headline: str = ""  # the words for it in the README


class Measurement(msgspec.Struct, forbid_unknown_fields=True):
    title: str
    command: str
    minutes: int  # on two cores
    watches: list[str]  # paths whose changes make the figures stale
    figures: dict[str, Claim]  # by their paths in the JSON of the command
    paper: str = ""
    needs: list[str] = []  # folders
    sides: list[str] = []  # what the README compares by it
    compared: dict[str, list[str]] = {}  # a figure of each side, by what it says


class Claims(msgspec.Struct, forbid_unknown_fields=True):
    needs: dict[str, str]  # the command that makes each folder
    measurements: list[Measurement]

    @classmethod
    def read(cls) -> Claims:
        return msgspec.json.decode((ROOT / "bench/claims.json").read_bytes(), type=cls)


def _words(command: str) -> list[str]:
    name, *words = shlex.split(command)
    beside = Path(sys.executable).parent / name
    return [str(beside) if beside.exists() else name, *words]


def measure(one: Measurement, needs: Mapping[str, str]) -> dict[str, Any]:
    """Runs a command. Returns its claimed figures, and where and when they were measured."""
    if _git("status", "--porcelain", "--", *watched(one)).strip():
        raise HplmError(f"files that `{one.command}` depends on have changed since the last commit: commit them first")
    for command in (needs[name] for name in one.needs if not (ROOT / name).exists()):
        print(command, file=sys.stderr, flush=True)
        if code := subprocess.run(_words(command), stdout=sys.__stderr__, cwd=ROOT).returncode:
            raise HplmError(f"`{command}` ended with status {code}: see its messages above")
    print(f"{one.command}: about {one.minutes} minutes", file=sys.stderr, flush=True)
    start, before = time.monotonic(), gflops()
    done = subprocess.run([*_words(one.command), "--json"], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    if not done.stdout.strip().endswith("}"):
        raise HplmError(f"`{one.command}` ended with status {done.returncode} and no figures: see its messages above")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    targets = found.get("targets", {})
    return {
        "commit": _git("rev-parse", "--short=8", "HEAD").strip(),
        "date": date.today().isoformat(),
        "cpu": fingerprint()["processor"],
        "gflops": [round(before), round(gflops())],
        "minutes": round((time.monotonic() - start) / 60, 1),
        "figures": {figure: at(found, figure) for figure in one.figures},
        "targets": {figure: targets.get(figure) or claim.target for figure, claim in one.figures.items()},
    }


def picture_of(command: str) -> str | None:
    """Returns the file below docs that a command draws its figures into."""
    words = shlex.split(command)
    return words[words.index("--picture") + 1] if "--picture" in words else None


def at(found: dict, path: str) -> Any:
    for name in path.split("/"):
        if name not in found:
            raise HplmError(f"the figures have no {path}: correct bench/claims.json, or install what the command lacks")
        found = found[name]
    return found


def verdict(value: float | None, target: str) -> str:
    """Returns `met`, `missed`, or an empty string where there is no target."""
    if not target:
        return ""
    _, bound, number = target.split()
    is_met = value is not None and (value >= float(number) if bound == "least" else value <= float(number))
    return "met" if is_met else "missed"


def stale(one: Measurement, result: dict[str, Any]) -> bool:
    """Whether a file that a figure depends on has changed since it was measured, or may have: this clone lacks the commit."""
    commit = result["commit"]
    if subprocess.run(["git", "-C", str(ROOT), "cat-file", "-e", commit], capture_output=True).returncode:
        return True
    return bool(_git("diff", "--name-only", "--no-renames", commit, "HEAD", "--", *watched(one), ":!*.md"))


def watched(one: Measurement) -> list[str]:
    if not one.command.startswith("hplm bench "):
        return one.watches
    return [*one.watches, "bench/server.py", "bench/turns.py", f"bench/{one.command.split()[2]}.py"]


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    if done.returncode:
        raise HplmError(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def lists(known: Sequence[Measurement], results: dict[str, Any]) -> str:
    """Returns all figures in Markdown. What most of them have in common, such as the machine, stands once, above them."""
    usual = {name: Counter(result[name] for result in results.values()).most_common(1)[0][0] for name in WHERE if results}
    blocks, unmeasured = [f"Where nothing else stands: {', '.join(map(brief, usual.values()))}."] if usual else [], []
    for one in known:
        if (result := results.get(one.command)) is None:
            unmeasured.append(f"`{one.command}`")
            continue
        others = [brief(result[name]) for name, most in usual.items() if result[name] != most]
        where = ", ".join([*others, f"{' and '.join(map(str, result['gflops']))} GFLOP/s"])
        lines = [f"**{one.title}**{f' ({one.paper})' if one.paper else ''}: `{one.command}`, {where}.\n"]
        for figure, claim in one.figures.items():
            value, target = result["figures"][figure], result["targets"][figure]
            bound = target.replace("at least", "≥").replace("at most", "≤")
            judged = f" ({bound}: {verdict(value, target).replace('missed', '**missed**')})" if target else ""
            lines.append(f"- {claim.says}: {shown(value)}{judged}")
        if picture := picture_of(one.command):
            lines.append(f"\n![{one.title}]({Path(picture).relative_to('docs')})")
        blocks.append("\n".join(lines))
    if unmeasured:
        blocks.append(f"**Not measured yet**: {', '.join(unmeasured)}.")
    return "\n\n".join(blocks)


def headlines(known: Sequence[Measurement], results: dict[str, Any]) -> str:
    """Returns the figures of the README in Markdown."""
    lines, compared = [], []
    for one in known:
        if one.command not in results:
            continue
        figures = results[one.command]["figures"]
        for figure, claim in one.figures.items():
            if claim.headline:
                value = figures[figure]
                lines.append(f"- {100 * value:.{0 if value >= 0.1 else 2}f} % {claim.headline}: `{one.command}`")
        if one.sides:
            rows = [f"| {says} | {' | '.join(shown(figures[side]) for side in own)} |" for says, own in one.compared.items()]
            compared.append("\n".join([f"| | {' | '.join(one.sides)} |", "|---" * (1 + len(one.sides)) + "|", *rows]))
            compared.append(f"Measured by `{one.command}` on two cores ({brief(results[one.command]['cpu'])}).")
    return "\n\n".join([*compared, "\n".join(lines)])


def brief(text: str) -> str:
    """Returns the name of a processor as people say it."""
    return text.replace("(R)", "").removesuffix(" Processor")


def shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


PAGES = {"docs/benchmarks.md": lists, "README.md": headlines}


def write_pages(known: Sequence[Measurement], results: dict[str, Any]) -> None:
    for page, figures in ((ROOT / name, figures) for name, figures in PAGES.items()):
        page.write_text(filled(page.read_text("utf-8"), figures(known, results)), "utf-8")


def filled(text: str, figures: str) -> str:
    """Returns a page with the figures between its markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise HplmError(f"the page has no {BEGIN} and {END}: put them back")
    return f"{before}{BEGIN}\n\n{figures}\n\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="bench.claims", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", action="store_true", help="measure, keep the results, and write them into the pages")
    parser.add_argument("--write", action="store_true", help="write the kept results into the pages")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="only commands that have one of these words")
    given = parser.parse_args(arguments)
    claims = Claims.read()
    wanted = [one for one in claims.measurements if not given.only or any(word in one.command for word in given.only)]
    if not wanted:
        parser.error(f"no command has the word {' or '.join(given.only)}: `python -m bench.claims` prints all commands")
    kept, failed = ROOT / RESULTS, 0
    results: dict[str, Any] = json.loads(kept.read_text("utf-8")) if kept.exists() else {}
    for one in wanted if given.run else ():
        try:
            results[one.command] = measure(one, claims.needs)
        except HplmError as error:  # the others take long
            failed += 1
            print(error, file=sys.stderr, flush=True)
            continue
        results = {each.command: results[each.command] for each in claims.measurements if each.command in results}
        kept.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
        write_pages(claims.measurements, results)
    if given.write:
        write_pages(claims.measurements, results)
    print(f"{lists(wanted, results)}\n")
    for one in wanted:
        if (result := results.get(one.command)) is not None and stale(one, result):
            print(f"{one.command}: {result['commit']}, stale")
    if failed:
        sys.exit(f"{failed} commands have no new figures: see their messages above")


if __name__ == "__main__":
    main()
