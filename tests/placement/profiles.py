"""Small profiles and clusters for the tests of placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hplm.placement.cluster import FORMAT, KIND, Cluster, Device, Machine
from hplm.placement.files import write
from hplm.placement.profile import BackboneProfile, FitError, Profile, Terms

MB = 1_000_000
MACHINE = {"processor": "a processor", "cores": "2"}


def backbone_profile(batch_ns: Sequence[float] = (3e6, 3e6, 1e6), layer_mb: int = 10, **changed: object) -> BackboneProfile:
    """Returns a profile of tenants `a` and `b` of the domain `law`, and `c` of the root. Each layer has a time a batch."""
    times = tuple(Terms(own, 1e4, 1.0, 1e3) for own in batch_ns)
    given: dict[str, object] = {
        "layers": len(times),
        "precision": "fp32",
        "export": "an export",
        "tenants": {"root": ("c",), "law": ("a", "b")},
        "parents": {"law": "root"},
        "entry_bytes": MB,
        "layer_bytes": (layer_mb * MB,) * len(times),
        "table_bytes": {"root": 100 * MB, "law": 20 * MB},
        "record_bytes": MB,
        "slots": 10,
        "slot_bytes": 3 * MB,
        "times": {1: times, 2: tuple(Terms(own / 2, 5e3, 0.5, 1e3) for own in batch_ns)},
        "around": Terms(1e6, 0.0, 0.0, 1e4),
        "core": Terms(2e5, 1e2, 0.0, 1e5),
    }
    return BackboneProfile(**{**given, **changed})  # pyright: ignore[reportArgumentType]


def profile_of(**backbones: BackboneProfile) -> Profile:
    return Profile(MACHINE, backbones or {"bert": backbone_profile()}, Terms(1e5, 10.0), FitError(0.01, 0.03))


def cluster_of(devices: int = 2, memory_mb: int = 100, machines: int = 1, tables_mb: int = 1000) -> Cluster:
    own = tuple(Device(f"cpu:{number}", memory_mb * MB) for number in range(devices))
    return Cluster(tuple(Machine(f"m{number}", own, tables_mb * MB) for number in range(machines)))


def write_cluster(cluster: Cluster, path: Path) -> None:
    """Writes it as an operator does."""
    write(path, KIND, FORMAT, asdict(cluster))
