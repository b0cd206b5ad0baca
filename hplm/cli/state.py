"""`hplm begin`, `backup` and `restore`: make the registry of a repository, copy it into a folder, and publish it again.

`hplm verify`: checks all stored files against their checksums.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from hplm.cli.options import Positive, about, read
from hplm.cli.served import HERE, ServedOptions, StateLocation, checked_state, state_of
from hplm.errors import HplmError, InvalidInput, some
from hplm.location import Location, location_of
from hplm.options import LEASE_SECONDS
from hplm.registered import of_stores

if TYPE_CHECKING:
    from hplm.tenants.verification import CheckedPath


OTHER = "a registry, also of another export: go on with its tenants, keys and limits, and with versions that fit"


def begin(
    *, served: ServedOptions = HERE, lease: Positive | None = None,
    source: Annotated[Location | None, read(location_of, help=OTHER, name="--from")] = None,
    from_repository: Path | None = None,
) -> dict:  # fmt: skip
    """Make a registry in a folder or a bucket, in which nothing was changed since the export; or change the lease of one.

    `hplm serve` makes a missing folder by itself. With --from, a new export goes on with what another one serves: versions that
    do not fit are replaced by those of the export, and exported tenants that are not served there are not served.

    :param lease: seconds for which a server that cannot see this registry answers for tenants with keys: a revoked key may open
        them so long (default: 300, or that of --from)
    :param from_repository: the export that the registry of --from is served with
    """
    from hplm.tenants.registry_writer import registries_of
    from hplm.tenants.state_folder import named_folders

    repository, state, backbone = served.repository, state_of(served.state), served.backbone
    if state is None:
        raise InvalidInput("give --state, the folder or bucket that `hplm serve --state` or HPLM_STATE will name")
    if (source is None) != (from_repository is None):
        raise InvalidInput("give --from and --from-repository together: a registry, and the export that it is served with")
    named_folders(repository, backbone)  # a wrong one is an error
    if source is not None and from_repository is not None:
        return _begin_from(repository, state, backbone, source, from_repository, lease)
    registries = registries_of(repository, state, backbone)
    begun, leased = list[str](), list[str]()
    for name, registry in registries.items():
        if registry.begin(lease or LEASE_SECONDS):
            begun.append(name)
        elif lease is not None and registry.pointer().lease_s != lease:
            registry.set_lease(lease)
            leased.append(name)
            print(f"{state}: the lease is {lease:g} s now, for {name}")
    if not begun and not leased:
        raise InvalidInput(f"{state} has a registry for {', '.join(registries)} already: nothing was changed")
    if begun:
        print(f"{state}: a registry without changes, for {', '.join(begun)}")
    return {"begun": begun, "leased": leased}


def _begin_from(
    repository: Path, state: Location, backbone: str | None, source: Location, from_repository: Path, lease: float | None
) -> dict[str, Any]:
    from hplm.tenants.manager import Manager
    from hplm.tenants.state_folder import named_folders
    from hplm.tenants.succession import begin_from

    begun: dict[str, Any] = {}
    names = [folder.parent.name for folder in named_folders(repository, backbone)]
    for name in names:
        taken = begin_from(Manager.open(repository, state, name), Manager.open(from_repository, source, name), lease)
        if taken is None:
            continue
        begun[name] = {"kept": taken.kept, "renewed": taken.renewed, "left_out": taken.left_out}
        print(f"{state}: a registry for {name} with the tenants of {source}: {len(taken.kept):,} with their versions")
        if taken.renewed:
            print(f"  {len(taken.renewed):,} with the version of this export: {some(taken.renewed)}")
        if taken.left_out:
            print(f"  not served there, and so not here: {some(taken.left_out)}; `hplm tenant publish` serves them")
    if not begun:
        raise InvalidInput(f"{state} has a registry for {', '.join(names)} already: nothing was changed")
    return {"begun": [*begun], "leased": [], "taken": begun}


def backup(*, to: Annotated[Path, about("new folder for the backup")], served: ServedOptions = HERE) -> dict:
    """Copy a registry, but not its repository, into a folder. It may be served meanwhile."""
    from hplm.tenants.backup import back_up

    manifest = back_up(served.manager(begun=False), to)
    print(f"generation {manifest['generation']} is in {to}")
    return manifest


def restore(
    *, source: Annotated[Path, about("folder that `hplm backup` wrote", name="--from")], accept_old_keys: bool = False,
    served: ServedOptions = HERE,
) -> dict:  # fmt: skip
    """Publish a backup as the next generation. Running servers take it as any change.

    A lost registry is made anew, and its servers go on with it.

    :param accept_old_keys: restore also if tenants with keys become open to everybody, if revoked keys work again, or if
        deleted tenants return with the keys of the backup, as all do where the state is lost
    """
    from hplm.tenants.backup import restore

    registry = served.manager(begun=False).registry
    manifest = restore(source, registry, accept_old_keys)
    print(f"generation {manifest['backed_up']} of the backup is generation {manifest['generation']} of {registry.store}")
    for what, names in (("open to everybody again", "opened"), ("revoked keys that work again", "revived"),
                        ("deleted tenants that are served again", "returned")):  # fmt: skip
        if manifest[names]:
            print(f"{what}: {', '.join(manifest[names])}")
    return manifest


def verify(*, store: Path | None = None, repository: Path | None = None, state: StateLocation = None) -> dict:
    """Check all stored files: tables, records and weights against their checksums, and that others can be read.

    Triton checks a config.pbtxt when it loads the model. Exit with 1 if something is broken, after listing all of it.

    :param store: folder that `hplm build` wrote
    :param repository: folder that `hplm export` wrote
    :param state: with --repository: the folder or the bucket of `hplm serve --state`; what the newest generation of a bucket
        needs is copied into TMPDIR first
    """
    if state is not None and repository is None:
        raise InvalidInput("--state needs --repository: give both")
    if store is not None and repository is None:
        return _verified(of_stores("parts")(store))
    if repository is None or store is not None:
        raise InvalidInput("give either --store or --repository")
    from hplm.tenants.backup import brought
    from hplm.tenants.verification import repository_parts

    place = checked_state(state)
    if place is None or isinstance(place, Path):
        return _verified(repository_parts(repository, place))
    with TemporaryDirectory(prefix="hplm-verify-") as folder:
        return _verified(repository_parts(repository, brought(repository, place, Path(folder))), (folder, str(place)))


def _verified(parts: Sequence[CheckedPath], shown: tuple[str, str] = ("", "")) -> dict[str, Any]:
    """Checks all parts. Errors name the second path of `shown` instead of the first one."""
    from tqdm import tqdm

    size, broken = sum(part.size for part in parts), []
    with tqdm(total=size, desc="verifying", unit="B", unit_scale=True) as bar:
        for part in parts:
            before = bar.n
            broken += part.check(part.path, bar.update)
            bar.update(part.size - (bar.n - before))
    if broken:
        raise HplmError("\n".join([f"{len(broken)} broken:", *(f"  {message.replace(*shown)}" for message in broken)]))
    kinds = [part.kind for part in parts]
    result = {"tables": kinds.count("table"), "records": kinds.count("record"), "files": kinds.count("file"), "gb": size / 1e9}
    print(f"ok: {result['tables']} tables, {result['records']} records, {result['gb']:,.3g} GB")
    return result
