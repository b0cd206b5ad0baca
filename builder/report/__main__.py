"""`python -m builder.report --tier 1`: eight tasks in four domains of docstrings, each with every scheme."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from builder.demo.__main__ import minilm
from builder.demo.data import write_demo_data
from builder.report.results import Results
from builder.report.study import Study
from builder.report.table import draw, markdown_of
from builder.report.tiers import TIERS
from hplm.engine.engine import resolve_device
from hplm.errors import HplmError


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m builder.report", description=__doc__)
    parser.add_argument("--tier", type=int, choices=sorted(TIERS), default=1, help="how much (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path(".hplm/report"), help="data and stores (default: %(default)s)")
    parser.add_argument(
        "--results", type=Path, default=Path("docs/results/accuracy"), help="a file a finished number (default: %(default)s)"
    )
    parser.add_argument("--model", help="Hugging Face name or folder of another BERT than MiniLM")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw it here (.png, .svg, .pdf)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    args = parser.parse_args(argv)
    tier, work = TIERS[args.tier], args.work / f"tier-{args.tier}"
    try:
        data = write_demo_data(work / "data", sizes=tier.sizes)
        device, results = resolve_device(args.device), Results(args.results)
        runs = Study(args.model or str(minilm()), data, tier, work, results, device).run()
        if args.picture is not None:
            draw(runs, args.picture)
    except HplmError as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    print(markdown_of(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
