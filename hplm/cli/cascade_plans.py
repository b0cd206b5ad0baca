"""Options and tables that commands of `hplm cascade` share: the target of a plan, and what plans score and cost."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from builder.cascade.selection import Target


def target_options(command: argparse.ArgumentParser, strong: str) -> None:
    """Adds the options of a target. `strong`: what a drop is counted from."""
    score = command.add_mutually_exclusive_group(required=True)
    score.add_argument("--drop", type=float, metavar="POINTS", help=f"most points below the score of {strong}")
    score.add_argument("--accuracy", type=float, metavar="SCORE", help="least score, from 0 to 1")
    command.add_argument(
        "--doubt", type=float, default=1.5, metavar="ERRORS",
        help="standard errors by which scores are trusted less: the best of many plans looks better than it is on the texts "
        "that chose it (default: %(default)s)",
    )  # fmt: skip
    command.add_argument("--latency-ms", type=float, metavar="MS", help="most milliseconds a text on average, in a full batch")


def target_of(args: argparse.Namespace) -> Target:
    from builder.cascade.selection import Target

    return Target(args.drop, args.accuracy, args.latency_ms, args.doubt)


def plans_text(plans: list[dict[str, Any]], metric: str) -> str:
    lines = [f"{metric:>10}{'+-':>8}{'mean ms':>10}{'p75 ms':>10}{'go on':>8}{'pruned':>8}  plan"]
    for plan in plans:
        goes_on = f"{plan['reached'][1]:.1%}" if len(plan["reached"]) > 1 else "-"
        pruned = f"{plan['pruned']:.1%}" if plan["pruned"] else "-"
        score = f"{plan['score']:>10.4f}{plan['error']:>8.4f}"
        lines.append(f"{score}{plan['mean_ms']:>10.3f}{plan['p75_ms']:>10.3f}{goes_on:>8}{pruned:>8}  {plan['plan']}")
    return "\n".join(lines)


def stacks_text(choices: list[dict[str, Any]]) -> str:
    """Returns what a batch takes by the stacks that the tenants' plans share."""
    from builder.cascade.common_stacks import LONGER

    lines = [
        f"a batch of {choices[0]['batch_tokens']:,} tokens of all these tenants, by the stacks besides the full one:",
        f"{'ms':>10}{'work':>8}  stacks",
    ]
    for one in choices:
        names = ", ".join(one["stacks"]) or "none"
        lines.append(f"{one['batch_ms']:>10.3f}{one['work']:>8.2f}  {names}{' (chosen)' if one['chosen'] else ''}")
    chosen = f"chosen: the fewest stacks whose batch takes at most {LONGER:.0%} longer than the fastest one"
    return "\n".join([*lines, "work: tokens times layers, of the full stack's", chosen])
