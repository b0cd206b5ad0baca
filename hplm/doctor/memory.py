"""Prices the memory of each decoder's process: upper layers, lower layers of all domains, rows that no table has, cache."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hplm.doctor.checks import OK, PROBLEM, Finding
from hplm.engine.backbone import WORDS
from hplm.generation.settings import DecoderSettings, read_settings
from hplm.location import Location, local_folder
from hplm.model.config import BackboneConfig
from hplm.model.weights import checksum_of, load_weights
from hplm.parameters import parameters_of
from hplm.plot.table import LOWER
from hplm.tenants.directory import Directory
from hplm.tenants.snapshot import Snapshot
from hplm.tenants.state_folder import EXPORTED_CONFIG, EXPORTED_TABLES, EXPORTED_UPPER, exported_folders


def decoders(repository: Path, state: Location | None, machine: int) -> list[Finding]:
    """`machine`: its bytes of memory."""
    served = zip(exported_folders(repository), Directory(repository, state).snapshots(), strict=True)
    return [
        _decoder(folder, state, snapshot, config, machine)
        for folder, snapshot in served
        if (config := BackboneConfig.load(folder / EXPORTED_CONFIG)).is_decoder
    ]


def _decoder(folder: Path, state: Location | None, snapshot: Snapshot, config: BackboneConfig, machine: int) -> Finding:
    name, settings = folder.parent.name, read_settings(parameters_of(folder.parent / "config.pbtxt"))
    places = [folder, *([local_folder(state) / name] if state else [])]
    files = [place / EXPORTED_TABLES / branch.folder / LOWER for branch in snapshot.branches for place in places]
    parts = {
        "upper layers": settings.dtype.itemsize * sum(own.numel() for own in load_weights(folder / EXPORTED_UPPER).values()),
        f"lower layers of {len(snapshot.branches)} tables": lower_bytes(file for file in files if file.exists()),
        "rows that no table has": settings.kept_bytes if config.lower_layers else 0,
        "keys and values": cache_bytes(settings, config),
    }
    says = f"{_gb(sum(parts.values()))} on {settings.device}, and what torch and adapters take: "
    says += ", ".join(f"{_gb(size)} of {part}" for part, size in parts.items() if size)
    if settings.device.type == "cpu" and sum(parts.values()) > machine:
        way_out = "serve it with more memory, or with fewer cache_tokens and kept_mb (docs/generation.md), or fewer domains"
        return Finding(f"memory of {name}", PROBLEM, f"{says}; here are {_gb(machine)}", way_out)
    return Finding(f"memory of {name}", OK, says)


def lower_bytes(files: Iterable[Path]) -> int:
    """Returns the memory of lower layers once they are opened: equal weights count once, words are as their file has them."""
    each: dict[tuple[str, str], int] = {}
    for file in files:
        for name, own in load_weights(file).items():
            each[name, checksum_of({name: own})] = own.numel() * (own.itemsize if name == WORDS else 4)
    return sum(each.values())


def cache_bytes(settings: DecoderSettings, config: BackboneConfig) -> int:
    return settings.cache_tokens * config.upper_layers * 2 * config.key_width * settings.dtype.itemsize


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f} GB"
