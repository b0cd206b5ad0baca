"""All faults of the bite list."""

from __future__ import annotations

from tests.bite.fault import Fault
from tests.bite.historic import FAULTS as HISTORIC
from tests.bite.mutations import FAULTS as MUTATIONS

FAULTS: list[Fault] = [*HISTORIC, *MUTATIONS]
