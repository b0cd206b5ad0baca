"""The calibration of a tenant's version: `calibration.json` beside its weights. It and the exits may be replaced."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from typing import Any

from builder.store.resumable import write_json
from builder.store.store import Store, TenantFile
from hplm.errors import MISFITS, Broken
from hplm.levels.calibration import KINDS, Calibration

log = logging.getLogger(__name__)
FILE = "calibration.json"
WAY_OUT = "calibrate the tenant again with `hplm calibrate`, or remove the file"


@dataclass(frozen=True)
class Calibrated:
    calibration: Calibration
    asked: dict[str, Any]  # the texts' digest, the precision and the options that it was fitted with
    report: dict[str, Any]


def read_calibrated(store: Store, tenant: TenantFile) -> Calibrated | None:
    """Returns the calibration of this version of a tenant; None if it has none, or that of another version of hplm."""
    path = store.tenant_folder(tenant.id, tenant.version) / FILE
    try:
        stored = json.loads(path.read_text("utf-8"))
        if (kind := stored["calibration"]["kind"]) not in KINDS:
            log.warning("%s has the kind %r, which is no longer served: calibrate the tenant again", path, kind)
            return None
        found = Calibrated(Calibration.read(stored["calibration"]), dict(stored["asked"]), dict(stored["report"]))
    except FileNotFoundError:
        return None
    except MISFITS as error:
        raise Broken(f"{path} does not describe a calibration ({error}): {WAY_OUT}") from None
    if not found.calibration.suits(len(tenant.labels)):
        raise Broken(f"{path} is of a tenant with another number of labels than {len(tenant.labels)}: {WAY_OUT}")
    return found


def calibration_of(store: Store, tenant: TenantFile) -> Calibration | None:
    found = read_calibrated(store, tenant)
    return found.calibration if found is not None else None


def save_calibrated(store: Store, tenant: TenantFile, found: Calibrated) -> None:
    content = {"calibration": asdict(found.calibration), "asked": found.asked, "report": found.report}
    write_json(store.tenant_folder(tenant.id, tenant.version) / FILE, content)
