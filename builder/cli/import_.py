"""`hplm import`: makes tenants in a store from LoRAs that `peft` saved, and from checkpoints that were fine-tuned in full."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from builder.cli.options import SOME_REFUSED, AtOnce, PartOption, RayAddress, open_store, workers
from builder.importing.options import Matching
from builder.part import WHOLE, Part
from hplm.cli.options import (
    Device,
    StoreFolder,
    TaskName,
    Words,
    about,
    device_of,
    refuse_given,
)  # fmt: skip
from hplm.errors import InvalidInput

if TYPE_CHECKING:
    from builder.importing.folders import Folders, Importer
    from builder.store.store import Store

FROM = "folders that peft or transformers saved, or a folder with such folders in it"


@Parameter(name="*", group="For one folder")
@dataclass(frozen=True)
class OneFolder:
    """The options for one folder."""

    id: str | None = None
    """name of the tenant (default: the folder's); if it exists, this becomes its next version"""
    labels: Words | None = None
    """the labels, in the order of their ids, between commas (default: from the files)"""
    task: TaskName = None
    """what it was trained for (default: from the files)"""
    test: Path | None = None
    """labelled JSONL to score the tenant on, as it will be served"""


CHECKPOINTS = Parameter(group="For checkpoints")
ONE_FOLDER, MATCHING = OneFolder(), Matching()


def import_(
    *, folders: Annotated[tuple[Path, ...], about(FROM, name="--from")], store: StoreFolder, domain: str = "root",
    repository: Path | None = None, device: Device = "auto", one: OneFolder = ONE_FOLDER,
    texts: Annotated[Path | None, CHECKPOINTS] = None, plan: Annotated[bool, CHECKPOINTS] = False,
    at_once: Annotated[AtOnce, CHECKPOINTS] = None, ray: Annotated[RayAddress, CHECKPOINTS] = None,
    part: Annotated[PartOption, CHECKPOINTS] = WHOLE,
    root: Annotated[str | None, CHECKPOINTS] = None, matching: Matching = MATCHING,
) -> tuple[dict[str, Any], int]:  # fmt: skip
    """Make tenants from saved adapters, or from checkpoints that were fine-tuned in full.

    :param domain: domain of the tenants
    :param repository: then export the store to this folder
    :param texts: texts like those the tenants get: one a line, or JSONL as for training, without labels; a file texts.jsonl in
        a checkpoint's folder is used instead (default: the corpus of --domain, if its files are still there)
    :param plan: only read and check the folders; print which fit, and their sizes
    :param root: if the store has no root, build it from this model as `hplm build root` does; its corpus is the field text of
        --texts
    """
    from builder.cli.build import Table
    from builder.cli.build import root as build_root
    from builder.cli.export import export
    from builder.importing.adapter_import import ImportOptions
    from builder.importing.checkpoint import ADAPTER_CONFIG, CONFIG, is_checkpoint
    from builder.importing.folders import Importer, Unbuilt, named
    from builder.store.resumable import PLAN

    found = named(folders)
    is_one = len(found) == 1 and part == WHOLE
    if one.id is not None and is_one:
        found = [(one.id, found[0][1])]
    if not any(os.path.exists(folder / name) for _, folder in found for name in (CONFIG, ADAPTER_CONFIG)):
        raise InvalidInput(
            f"--from {' '.join(map(str, folders))}: there is no checkpoint ({CONFIG}) and no adapter ({ADAPTER_CONFIG}): "
            "give the folder that a library saved, or one with such folders in it"
        )
    if not any(is_checkpoint(folder) for _, folder in found):
        refuse_given("works for checkpoints of whole models, and none is given: leave it out", matching, texts=texts)
    if not is_one:
        reason = f"works for one folder, and {len(found)} are given{'' if part == WHOLE else ' in parts'}: leave it out"
        refuse_given(reason, one)
    labels = [*one.labels] if one.labels is not None else None
    options = ImportOptions(domain, labels, one.task, one.test)
    is_built = (store / "plot/root/1").exists() and not (store / "building/root-1" / PLAN).exists()  # which goes last
    to_build = None if is_built else root
    if to_build is not None:
        if part != WHOLE:
            raise InvalidInput(f"--part {part}: each part would build another root: first build it, by `hplm build root`")
        if domain != "root":
            raise InvalidInput(f"--domain {domain}: a store that --root builds has the domain root alone: leave it out")
        if texts is None:
            raise InvalidInput("--root needs --texts, from which the root's lower layers learn too: give both")
        if not plan:
            made_by = Table(seed=matching.seed, device=device)
            build_root(model=to_build, corpus=(texts,), store=store, table=made_by)
    opened = Unbuilt(store, to_build) if plan and to_build is not None else _opened(store, root)
    importer = Importer(opened, options, matching, texts, device_of(device))
    if is_one:
        refuse_given("works for several folders, and one is given: leave it out", ray=ray)
    found = part.among(found)
    if plan:
        return _plan(importer, found, one.id is not None)
    result = _one(importer, *found[0], one.id is not None) if is_one else _many(importer, found, at_once, ray, part)
    if repository is not None:
        export(store=store, repository=repository, device=device)
    elif is_one or result[0]["imported"]:  # one that cannot be imported raises
        print(f"next: hplm export --store {store} && hplm serve")
    return result


def _opened(folder: Path, root: str | None) -> Store:
    """Returns the store. Refuses one whose root is another than the one that was asked for."""
    from builder.store.store import absolute_model

    store = open_store(folder)
    if root is not None and absolute_model(root) != store.model:
        raise InvalidInput(f"--root {root}: the store {folder} was made from {store.model}: name another --store")
    return store


def _one(importer: Importer, id: str, folder: Path, is_named: bool) -> tuple[dict[str, Any], int]:
    """Imports a folder, and prints what came of it."""
    tenant, report = importer.one(id, folder, is_named)
    came = report["imported"]
    without = "only a head" if tenant.has_head else "no adapter"
    adapter = f"{tenant.adapter} of rank {tenant.rank}" if tenant.rank else without
    heads = f"{len(tenant.labels)} labels" if tenant.has_head else tenant.task
    print(f"tenant {tenant.id} version {tenant.version}: {adapter}, {heads}, from {came['library']}")
    if "after" in report:
        from builder.importing.reports import facts_of

        for name, value in facts_of(report).items():
            print(f"  {name}: {value}")
        print(report["note"])
    else:
        print(
            f"the adapter was trained on {came['trained_on']}, the store was made from {came['store_made_from']}; "
            f"{report['note']}"
        )
    for where, scores in report.get("test", {}).items():
        told = (f"{name} {value:.3f}" for name, value in scores.items() if isinstance(value, float))
        print(f"{where}: {', '.join(told)}, over {scores['rows']:,} rows")
    named = {"tenant": tenant.id, "version": tenant.version, "domain": tenant.domain, "domain_version": tenant.domain_version}
    trained = {"adapter": tenant.adapter if tenant.rank else None, "rank": tenant.rank, "labels": tenant.labels}
    return {**named, **trained, **report}, 0


def _plan(importer: Importer, folders: Folders, is_named: bool) -> tuple[dict[str, Any], int]:
    """Says what would become of each folder. The status is 1 if one of them would be refused."""
    from builder.console import say
    from builder.importing.folders import called

    took = [report["took"] for report in importer.store.reports().values() if "took" in report]
    found = []
    for one in importer.plan(folders, is_named):
        found.append(one)
        of = one.report
        fits = f"{of['task']}, {of['labels']:,} labels, changed by {of['distance']:.3f}" if of else "an adapter"
        say(f"{called(one.id, one.folder)}: {one.refused or fits}")
    kept = {one.id: one.report for one in found if one.report}
    refused = {one.id: one.refused for one in found if one.refused}
    sizes = {side: sum(report["bytes"][side] for report in kept.values()) for side in ("before", "after")}
    each = f"{sum(took) / len(took):.0f} s each, as earlier ones here" if took else "the first one will tell its time"
    become = f"; {sizes['before'] / 1e6:,.1f} MB become {sizes['after'] / 1e6:,.1f} MB; {each}" if kept else ""
    print(f"checkpoints that fit: {len(kept)}; folders that do not: {len(refused)}{become}")
    return {
        "fit": {name: {**report, "bytes": report["bytes"]["after"]} for name, report in kept.items()},
        "refused": refused,
        "bytes": sizes,
        "seconds_each": round(sum(took) / len(took), 1) if took else None,
    }, int(bool(refused))


def _many(importer: Importer, folders: Folders, at_once: int | None, ray: str | None, part: Part) -> tuple[dict[str, Any], int]:
    """Imports all folders. The status is SOME_REFUSED if one of them was refused."""
    from builder.console import progress_bar, say
    from builder.importing.folders import PAGE, called, write_page
    from builder.importing.reports import shown, totals

    store, found = importer.store, []
    others = [path for path in (importer.given, Path(store.model)) if path is not None]
    try:
        with (
            workers(at_once, ray, store, [importer.options.domain], others, importer.device.type) as pool,
            progress_bar(importer.all(folders, pool), "importing", total=len(folders), unit="folder") as bar,
        ):
            for one in bar:
                found.append(one)
                name = called(one.id, one.folder)
                if one.tenant is None:
                    say(f"{name} refused: {one.refused}")
                    continue
                answers = f", {one.agreement:.1%} of the answers are the checkpoint's" if one.agreement is not None else ""
                say(f"tenant {name} version {one.tenant.version}{answers}")
    finally:
        page = write_page(store, found, part.page(PAGE))
    refused = [one for one in found if one.tenant is None]
    together = totals([one.report for one in found if "after" in one.report])
    print(f"tenants imported: {len(found) - len(refused)}; folders refused: {len(refused)}; {page}")
    for name, value in shown(together).items() if together["checkpoints"] else ():
        print(f"  {name}: {value}")
    return {
        "totals": together,
        "imported": {one.id: {"version": one.tenant.version, "agreement": one.agreement} for one in found if one.tenant},
        "refused": {one.id: {"why": one.refused, "agreement": one.agreement} for one in refused},
        "page": str(page),
    }, SOME_REFUSED if refused else 0
