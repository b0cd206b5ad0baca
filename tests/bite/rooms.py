"""Which tests look at which room. Only here: change it when tests move. What does not exist is left out."""

from __future__ import annotations

from pathlib import Path

# For each room: folders and files whose quick tests run; then those whose slow tests run if the quick ones found nothing.
ROOMS: dict[str, tuple[str, str]] = {
    "scheduling": ("tests/scheduling", "tests/scheduling"),
    "engine": (
        "tests/engine tests/request tests/faults tests/answers",
        "tests/engine/test_encoder_machine.py tests/engine/test_[bcdst]*.py tests/answers",
    ),
    "generation": ("tests/generation tests/answers", "tests/generation tests/answers/test_gen*.py"),
    "tenants": ("tests/tenants tests/refusals", "tests/tenants/test_[bcdkqrst]*.py"),
    "registry": ("tests/registry", "tests/registry"),
    "plot": ("tests/plot", "tests/plot"),
    "adapters": ("tests/adapters tests/engine/test_st*.py", "tests/engine/test_slots*.py tests/engine/test_mixed*.py"),
    "levels": ("tests/levels", "tests/builder/evaluation"),
    "model": ("tests/model", "tests/model"),
    "metrics": ("tests/metrics", ""),
    "cli": ("tests/cli", "tests/cli/test_state.py tests/cli/test_each_command.py"),
    "placement": ("tests/placement", ""),
    "doctor": ("tests/doctor", ""),
    "server": (
        "tests/server tests/faults tests/refusals",
        "tests/faults tests/server/test_supervisor.py tests/server/test_engine_ends.py",
    ),
    "backends": (
        "tests/server tests/engine tests/refusals",
        "tests/answers tests/server/test_keys.py tests/refusals/test_wire.py "
        "tests/server/test_metrics.py tests/server/test_generation.py",
    ),
    "publish": ("tests/builder/publish", "tests/builder/publish"),
    "builder": (
        "tests/builder/store tests/builder/tables tests/builder/training tests/builder/importing",
        "tests/builder/store tests/builder/tables/test_domain.py",
    ),
    "training": ("tests/builder/training", "tests/builder/training"),
    "importing": ("tests/builder/importing", "tests/builder/importing"),
    "clients": ("clients/tests", "clients/tests"),
}


def tests_of(rooms: tuple[str, ...], root: Path, slow: bool) -> list[str]:
    """Returns the folders and files of these rooms that exist, each once."""
    patterns = [pattern for room in rooms for pattern in ROOMS[room][slow].split()]
    found = [str(path.relative_to(root)) for pattern in patterns for path in sorted(root.glob(pattern))]
    return list(dict.fromkeys(found))
