"""`hplm cascade`: easy texts are answered by a few layers, and the others go on to more of them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hplm.cli import cascade_across, cascade_build, cascade_report
from hplm.cli.cascade_plans import plans_text, stacks_text, target_of, target_options
from hplm.cli.options import held_out_options
from hplm.errors import HplmError, InvalidInput

if TYPE_CHECKING:
    from builder.cascade.profile import Profile
    from builder.cascade.selection import Target
    from builder.store.store import Store

NEXT = "next: `hplm export`, or `hplm tenant update` where it is served"


def register(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "cascade",
        help="answer easy texts with fewer layers",
        description="A tenant may have levels: adapters and heads on shallower stacks. A plan sends a text to the next level "
        "only if the answer so far is not sure enough.",
    )
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    cascade_build.register(actions)
    _register_profile(actions)
    _register_select(actions)
    cascade_report.register(actions)
    cascade_across.register(actions)


def _register_profile(actions: argparse._SubParsersAction) -> None:
    command = actions.add_parser(
        "profile",
        help="measure what plans of a tenant's levels score and cost",
        description="Compute each level of a tenant's newest version once on labelled texts, and try plans of one to three "
        "levels on the answers. The same command changes nothing, except for --again.",
    )
    command.add_argument("--store", type=Path, required=True, help="folder of the store")
    command.add_argument("--id", required=True, help="name of the tenant")
    held_out_options(command)
    command.add_argument(
        "--again", action="store_true", help="measure times again, because this machine was busy or another one will serve"
    )
    command.add_argument("--picture", type=Path, metavar="FILE", help="draw scores over costs into a .png, .svg or .pdf file")
    command.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    command.add_argument("--json", action="store_true", help="end with one line of JSON")
    command.set_defaults(run=run_profile)


def _register_select(actions: argparse._SubParsersAction) -> None:
    command = actions.add_parser(
        "select",
        help="choose the fastest plan that meets a target",
        description="Choose from a profile the plan that takes the least time and meets the target, and the cheaper ones below "
        "it: the ladder that is served. With --all, the plans of all tenants share few stacks.",
    )
    command.add_argument("--store", type=Path, required=True, help="folder of the store")
    tenants = command.add_mutually_exclusive_group(required=True)
    tenants.add_argument("--id", help="name of the tenant")
    tenants.add_argument("--all", action="store_true", help="every tenant that has levels, with few stacks for all of them")
    target_options(command, "the tenant's own level")
    command.add_argument("--json", action="store_true", help="end with one line of JSON")
    command.set_defaults(run=run_select)


def run_profile(args: argparse.Namespace) -> dict[str, Any]:
    from builder.cascade.levels import open_levels
    from builder.cascade.profiling import profile_tenant
    from builder.cascade.selection import reported
    from builder.evaluation.tenant import find_tenant
    from builder.publish.precision import served_precision
    from builder.store.store import Store
    from hplm.cli.options import device_of

    store, device = Store(args.store), device_of(args)
    if args.picture is not None:
        from builder.pictures import check_picture

        check_picture(args.picture)
    tenant = find_tenant(store, args.id)
    levels = open_levels(store, tenant)
    precision = served_precision(store, args.dtype, device)
    profile, is_new = profile_tenant(store, tenant, levels, args.texts, precision, device, args.seen, again=args.again)
    if args.picture is not None:
        from builder.cascade.profile_picture import draw_profile

        draw_profile(profile, args.picture)
    report = profile.report
    plans = [reported(one, profile.names) for one in profile.front]
    if not args.json:
        print(_profile_text(report))
        print(plans_text(plans, report["metric"]))
        print("next: `hplm cascade select`" if is_new else "nothing has changed")
    return {**report, "front": plans, "changed": is_new}


def run_select(args: argparse.Namespace) -> dict[str, Any]:
    from builder.cascade.ladder import choose_ladder
    from builder.cascade.levels import open_levels
    from builder.evaluation.tenant import find_tenant
    from builder.store.store import Store

    target, store = target_of(args), Store(args.store)
    if args.all:
        return _select_all(store, target, args.json)
    tenant = find_tenant(store, args.id)
    chosen = choose_ladder(store, tenant, open_levels(store, tenant), target)
    if not args.json:
        print(_chosen_text(chosen))
        print(NEXT)
    return {"tenants": [chosen]}


def _select_all(store: Store, target: Target, is_json: bool) -> dict[str, Any]:
    from builder.cascade.ladder import check_target, choose_ladders, profile_of
    from builder.cascade.levels import open_levels
    from builder.store.levels import level_names

    tenants = [tenant for tenant in store.tenants() if level_names(store, tenant)]
    if not tenants:
        raise InvalidInput(f"no tenant in {store.folder} has levels: make one with `hplm cascade build`")
    profiles: dict[str, Profile] = {}
    for tenant in tenants:
        try:
            profile = profile_of(store, tenant, open_levels(store, tenant))
            check_target(tenant, profile, target)
            profiles[tenant.id] = profile
        except HplmError as error:
            print(error, file=sys.stderr)
    failed = [tenant.id for tenant in tenants if tenant.id not in profiles]
    if not profiles:
        raise InvalidInput(f"no ladder was chosen for {', '.join(failed)}")
    chosen, stacks = choose_ladders(store, [one for one in tenants if one.id in profiles], profiles, target)
    if not is_json:
        for one in chosen:
            print(_chosen_text(one))
        print(stacks_text(stacks))
    if failed:
        raise InvalidInput(
            f"no ladder was chosen for {', '.join(failed)}: they keep their former ladders, if they have any, and the table of "
            f"stacks does not count them; {len(chosen)} other tenants have theirs"
        )
    if not is_json:
        print(NEXT)
    return {"tenants": chosen, "stacks": stacks}


def _profile_text(report: dict[str, Any]) -> str:
    lines = [
        f"{report['tenant']} version {report['version']} in {report['precision']}: {report['tried']:,} plans tried on "
        f"{report['texts']:,} texts of {report['file']}; {report['left_out']:,} more were left out, because the training has "
        "seen them",
        f"{'level':<20}{'layers':>8}{report['metric']:>12}{'mean ms':>10}",
    ]
    lines += [
        f"{level['name']:<20}{level['layers']:>8}{level['score']:>12.4f}{level['mean_ms']:>10.3f}" for level in report["levels"]
    ]
    return "\n".join(lines)


def _chosen_text(chosen: dict[str, Any]) -> str:
    own, first = chosen["own"], chosen["ladder"][0]
    return (
        f"{chosen['tenant']} version {chosen['version']}: {first['plan']}, {chosen['metric']} {first['score']:.4f} in "
        f"{first['mean_ms']:.3f} ms; its own level alone has {own['score']:.4f} in {own['mean_ms']:.3f} ms\n"
        f"{plans_text(chosen['ladder'], chosen['metric'])}"
    )
