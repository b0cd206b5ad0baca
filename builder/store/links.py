"""The link of a tenant's version to a tenant of another backbone: `link.json` beside its weights.

It belongs to the levels and calibrations for which it was made. With others it is not published.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from builder.store.calibrations import calibration_of
from builder.store.levels import LINK, stored_levels
from builder.store.resumable import write_json
from builder.store.store import Store, TenantFile
from hplm.errors import MISFITS, Broken
from hplm.tenants.link import Link

MAKE_AGAIN = "make it again with `hplm cascade across`"


def link_of(store: Store, tenant: TenantFile) -> Link | None:
    """Returns the link of this version of a tenant; None if it has none."""
    path = _link_file(store, tenant)
    try:
        stored = json.loads(path.read_text("utf-8"))
        link, made_for = Link.read(stored["link"]), stored["levels"]
    except FileNotFoundError:
        return None
    except MISFITS as error:
        raise Broken(f"{path} does not describe a link ({error}): {MAKE_AGAIN}") from None
    levels = _levels(store, tenant)
    if made_for != levels or not link.suits(len(levels)):
        raise Broken(
            f"{path} is for other levels or calibrations than those of tenant {tenant.id!r}: {MAKE_AGAIN}, or remove it with "
            "`hplm cascade unlink`"
        )
    return link


def save_link(store: Store, tenant: TenantFile, link: Link, report: Mapping[str, Any]) -> None:
    """`report`: what is known of its plan."""
    content = {"link": asdict(link), "levels": _levels(store, tenant), "report": report}
    write_json(_link_file(store, tenant), content)


def remove_link(store: Store, tenant: TenantFile) -> bool:
    """Whether there was one."""
    path = _link_file(store, tenant)
    if not path.exists():
        return False
    path.unlink()
    return True


def _levels(store: Store, tenant: TenantFile) -> list[Any]:
    """Returns the names of the levels and their calibrations, its own one last, in the form of JSON."""
    own = calibration_of(store, tenant)
    levels = [[level.stack, asdict(level.calibrated.calibration)] for level in stored_levels(store, tenant)]
    return json.loads(json.dumps([*levels, ["", asdict(own) if own is not None else None]]))


def _link_file(store: Store, tenant: TenantFile) -> Path:
    return store.tenant_folder(tenant.id, tenant.version) / LINK
