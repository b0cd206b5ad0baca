"""`hplm cascade across` and `unlink`: texts of which one backbone is not sure go on to a larger one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hplm.cli.cascade_plans import plans_text, target_of, target_options
from hplm.cli.options import held_out_options


def register(actions: argparse._SubParsersAction) -> None:
    across = actions.add_parser(
        "across",
        help="let unsure texts go on to a tenant of a larger backbone",
        description="Compute a tenant and one of another backbone, with the same task and labels, on the same labelled texts, "
        "choose which answers are not sure enough, and store the link beside the tenant's newest version. The model `hplm` "
        "follows it.",
    )
    across.add_argument("--store", type=Path, required=True, help="folder of the store in which the link begins")
    across.add_argument("--id", required=True, help="name of the tenant")
    across.add_argument("--to", type=Path, required=True, metavar="STORE", help="folder of the larger backbone's store")
    across.add_argument("--to-id", metavar="ID", help="name of the tenant there (default: the same)")
    held_out_options(across)
    target_options(across, "the tenant there")
    across.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    across.add_argument("--json", action="store_true", help="end with one line of JSON")
    across.set_defaults(run=run_across)
    unlink = actions.add_parser(
        "unlink", help="remove what `across` has stored", description="Let all texts of a tenant stay in their backbone."
    )
    unlink.add_argument("--store", type=Path, required=True, help="folder of the store")
    unlink.add_argument("--id", required=True, help="name of the tenant")
    unlink.add_argument("--json", action="store_true", help="end with one line of JSON")
    unlink.set_defaults(run=run_unlink)


def run_across(args: argparse.Namespace) -> dict[str, Any]:
    from builder.cascade.across import Side, check_sides, link_tenants
    from builder.evaluation.tenant import find_tenant
    from builder.publish.precision import served_precision
    from builder.store.store import Store
    from hplm.cli.options import device_of

    target, device = target_of(args), device_of(args)
    stores = Store(args.store), Store(args.to)
    tenants = [find_tenant(store, name) for store, name in zip(stores, (args.id, args.to_id or args.id), strict=True)]
    near, far = map(Side, stores, tenants)
    check_sides(near, far)  # before precisions are measured
    precisions = [served_precision(store, args.dtype, device) for store in stores]
    report = link_tenants(near, far, args.texts, target, precisions, device, args.seen)
    if not args.json:
        print(_described(report))
        print("next: `hplm export`, or `hplm tenant update` where it is served" if report["changed"] else "nothing has changed")
    return report


def run_unlink(args: argparse.Namespace) -> dict[str, Any]:
    from builder.evaluation.tenant import find_tenant
    from builder.store.links import remove_link
    from builder.store.store import Store

    store = Store(args.store)
    tenant = find_tenant(store, args.id)
    removed = remove_link(store, tenant)
    if not args.json:
        print("next: `hplm export`, or `hplm tenant update` where it is served" if removed else "there was no link")
    return {"tenant": tenant.id, "version": tenant.version, "changed": removed}


def _described(report: dict[str, Any]) -> str:
    lines = [
        f"{report['tenant']} version {report['version']}, on {report['texts']:,} texts of {report['file']}; "
        f"{report['left_out']:,} more were left out, because a training has seen them",
        f"{'level':<32}{report['metric']:>12}{'mean ms':>10}",
    ]
    lines += [f"{level['name']:<32}{level['score']:>12.4f}{level['mean_ms']:>10.3f}" for level in report["levels"]]
    return "\n".join([*lines, plans_text([report["plan"]], report["metric"])])
