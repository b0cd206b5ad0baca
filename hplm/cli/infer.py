"""`hplm infer`: sends one text through hplm_client and prints the answer."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from hplm.cli.client import connection_options, open_client

if TYPE_CHECKING:
    from hplm_client import Answer

WIDEST_EXCERPT = 48


def register(commands: Any) -> None:
    summary = "send a text to a running server"
    command: argparse.ArgumentParser = commands.add_parser("infer", help=summary, description=summary.capitalize() + ".")
    command.add_argument("text", help="the text to send")
    command.add_argument("--tenant", required=True, help="the tenant that answers")
    command.add_argument("--pair", metavar="TEXT", help="second text, for tenants that read two")
    connection_options(command, "address of the server (default: 127.0.0.1:8000, for gRPC 127.0.0.1:8001)")
    command.add_argument(
        "--backbone",
        metavar="NAME",
        help="name of the backbone (default: the only one of the server; the front door does not tell it)",
    )
    command.add_argument(
        "--deadline-ms", type=float, metavar="MS", help="time in which the answer must come (default: the tenant's own)"
    )
    command.add_argument("--top-k", type=int, metavar="K", help="return the K best labels instead of one")
    command.add_argument("--truncate", action="store_true", help="cut a text that is too long, instead of refusing it")
    command.add_argument(
        "--rung",
        type=int,
        metavar="N",
        help="answer by this rung of the tenant, 1 is the dearest, and say which level has answered (default: by load)",
    )
    command.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> dict[str, Any]:
    with open_client(args, args.backbone) as client:
        answer = client.infer(
            args.text,
            tenant=args.tenant,
            pair=args.pair,
            deadline_ms=args.deadline_ms,
            top_k=args.top_k,
            truncate=args.truncate,
            confidence=True,
            rung=args.rung,
            level=args.rung is not None,
        )
    if not args.json:
        print(table(answer, args.text if args.pair is None else None))
        sure = f", confidence {answer.confidence:.4f}" if answer.confidence is not None else ""
        level = f", level {answer.level}" if answer.level is not None else ""
        print(f"tenant {args.tenant}, version {answer.version}{level}{sure}")
    return {
        "tenant": args.tenant,
        "label": answer.label,
        "score": answer.score,
        "rows": [{"label": row.label, "score": row.score, "span": list(row.span)} for row in answer.rows],
        "version": answer.version,
        "confidence": answer.confidence,
        "level": answer.level,
    }


def table(answer: Answer, text: str | None) -> str:
    """Returns aligned columns. For a pair there are no excerpts: the task decides which of the two texts spans refer to."""
    if not answer.rows:
        return "no labels"
    lines = [("LABEL", "SCORE", "SPAN", "TEXT" if text is not None else "")]
    for row in answer.rows:
        start, end = row.span
        excerpt = " ".join(text[start:end].split()) if text is not None else ""
        if len(excerpt) > WIDEST_EXCERPT:
            excerpt = excerpt[: WIDEST_EXCERPT - 1] + "…"
        lines.append((row.label or "-", f"{row.score:.4f}", f"{start}-{end}", excerpt))
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    return "\n".join(
        f"{label:<{widths[0]}}  {score:>{widths[1]}}  {span:>{widths[2]}}  {excerpt}".rstrip()
        for label, score, span, excerpt in lines
    )
