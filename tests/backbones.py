"""Two toy backbones of different shapes in one repository, and a placement that gives both the same devices."""

import shutil
from dataclasses import replace

from hplm.model.windows import Window
from hplm.placement.placement import Group, Placement
from hplm.placement.units import Unit
from hplm.tenants.snapshot import Snapshot
from testing.toy import CONFIG, make_toy

DEEP = replace(CONFIG, name="deep", hidden=48, heads=6, upper_layers=4, window=Window(5))
NAMES = (CONFIG.name, DEEP.name)
WHOLE = {"toy": ((0, CONFIG.upper_layers - 1),), "deep": ((0, DEEP.upper_layers - 1),)}
CUT = {"toy": ((0, 0), (1, CONFIG.upper_layers - 1)), "deep": ((0, 1), (2, DEEP.upper_layers - 1))}


def make_two(folder):
    """Returns the repository of both, and the stores by backbone."""
    both = {config.name: make_toy(folder / config.name, config) for config in (CONFIG, DEEP)}
    repository = folder / "repository"
    for toy in both.values():
        shutil.copytree(toy.repository, repository, dirs_exist_ok=True)
    return repository, {name: toy.store for name, toy in both.items()}


def placement_of_two(repository, devices, cuts):
    """Returns the placement of all tenants of both in one group, whose name is `both`."""
    units = tuple(Unit(f"{name}/{domain}", 3) for name in NAMES for domain in ("root", "law", "bio"))
    exports = {name: Snapshot.load(repository / name / "1/tenants.json").export for name in NAMES}
    group = Group("both", "m0", devices, 1, cuts, tuple(unit.name for unit in units))
    return Placement((group,), units, dict.fromkeys(NAMES, "fp32"), exports, "a cluster", "a profile")
