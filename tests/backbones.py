"""Two toy backbones of different shapes in one repository, and a placement that gives both the same devices."""

import shutil
from dataclasses import replace

from hplm.model.windows import Window
from hplm.placement.placement import Group, Placement
from hplm.placement.units import Unit
from hplm.tenants.snapshot import Snapshot
from testing.toy import CONFIG, ROTARY, make_toy

DEEP = replace(ROTARY, name="deep", hidden=48, heads=6, upper_layers=4, window=Window(5))
NAMES = (CONFIG.name, DEEP.name)


def whole(*configs):
    """Returns cuts into one stage."""
    return {config.name: ((0, config.upper_layers - 1),) for config in configs}


def halved(*configs):
    """Returns cuts into two stages."""
    middles = [(config, config.upper_layers // 2) for config in configs]
    return {config.name: ((0, middle - 1), (middle, config.upper_layers - 1)) for config, middle in middles}


WHOLE, CUT = whole(CONFIG, DEEP), halved(CONFIG, DEEP)


def make_two(folder):
    """Returns the repository of both, and the stores by backbone."""
    both = {config.name: make_toy(folder / config.name, config) for config in (CONFIG, DEEP)}
    repository = folder / "repository"
    for toy in both.values():
        shutil.copytree(toy.repository, repository, dirs_exist_ok=True)
    return repository, {name: toy.store for name, toy in both.items()}


def placement_of_two(repository, devices, cuts):
    """Returns the placement of all tenants of these backbones in one group, whose name is `both`."""
    snapshots = {name: Snapshot.load(repository / name / "1/tenants.json") for name in cuts}
    domains = [(name, domain) for name, own in snapshots.items() for domain in sorted({one.domain for one in own.tenants})]
    units = tuple(Unit(f"{name}/{domain}", 3) for name, domain in domains)
    exports = {name: own.export for name, own in snapshots.items()}
    group = Group("both", "m0", devices, 1, cuts, tuple(unit.name for unit in units))
    return Placement((group,), units, dict.fromkeys(cuts, "fp32"), exports, "a cluster", "a profile")
