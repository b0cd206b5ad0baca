"""Known vulnerabilities of Triton, and the release that fixes each: those of NVIDIA's security bulletins of 2025 and 2026.

Source: the repository NVIDIA/product-security, folders 2025 and 2026, one folder a bulletin. docs/security.md says what helps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NEWEST_BULLETIN = "2026-08-18"  # the bulletins until this day are in the list

# CVE, the first release with the fix, severity, the bulletin's number
_LIST = """
CVE-2024-53880  24.12 medium   5612
CVE-2025-23323  25.05 high     5687
CVE-2025-23324  25.05 high     5687
CVE-2025-23325  25.05 high     5687
CVE-2025-23326  25.05 high     5687
CVE-2025-23327  25.05 high     5687
CVE-2025-23335  25.05 medium   5687
CVE-2025-23322  25.06 high     5687
CVE-2025-23331  25.06 high     5687
CVE-2025-23268  25.07 high     5687
CVE-2025-23310  25.07 critical 5687
CVE-2025-23311  25.07 critical 5687
CVE-2025-23317  25.07 critical 5687
CVE-2025-23318  25.07 high     5687
CVE-2025-23319  25.07 high     5687
CVE-2025-23320  25.07 high     5687
CVE-2025-23321  25.07 high     5687
CVE-2025-23333  25.07 medium   5687
CVE-2025-23334  25.07 medium   5687
CVE-2025-23316  25.08 critical 5691
CVE-2025-23328  25.08 high     5691
CVE-2025-23329  25.08 high     5691
CVE-2025-23336  25.08 medium   5691
CVE-2025-33202  25.09 high     5723
CVE-2025-33201  25.10 high     5734
CVE-2025-33211  25.10 high     5734
CVE-2025-33238  26.01 high     5790
CVE-2025-33254  26.01 high     5790
CVE-2026-24158  26.01 high     5790
CVE-2026-24146  26.02 high     5816
CVE-2026-24147  26.02 medium   5816
CVE-2026-24173  26.02 high     5816
CVE-2026-24174  26.02 high     5816
CVE-2026-24175  26.02 high     5816
CVE-2026-24206  26.03 high     5828
CVE-2026-24207  26.03 critical 5828
CVE-2026-24208  26.03 medium   5828
CVE-2026-24209  26.03 high     5828
CVE-2026-24210  26.03 high     5828
CVE-2026-24213  26.03 high     5828
CVE-2026-24214  26.03 high     5828
CVE-2026-24215  26.03 medium   5828
CVE-2026-47487  26.03 medium   5860
CVE-2026-24264  26.04 high     5848
CVE-2026-24266  26.04 medium   5848
CVE-2026-47476  26.05 high     5853
CVE-2026-47477  26.05 high     5853
CVE-2026-47478  26.05 high     5853
CVE-2026-47479  26.05 high     5853
CVE-2026-47480  26.05 high     5853
CVE-2026-47481  26.05 medium   5853
CVE-2026-47482  26.05 high     5853
CVE-2026-47606  26.06 medium   5865
CVE-2026-47627  26.06 critical 5865
CVE-2026-47628  26.06 high     5865
CVE-2026-47629  26.06 high     5865
CVE-2026-47630  26.06 medium   5865
"""

# NVIDIA's name of the release, and the version that `GET /v2` tells: from the tags of triton-inference-server/server.
_VERSIONS = """
24.10 2.51.0, 24.11 2.52.0, 24.12 2.53.0, 25.01 2.54.0, 25.02 2.55.0, 25.03 2.56.0, 25.04 2.57.0, 25.05 2.58.0,
25.06 2.59.0, 25.07 2.59.1, 25.08 2.60.0, 25.09 2.61.0, 25.10 2.62.0, 25.11 2.63.0, 25.12 2.64.0, 26.01 2.65.0,
26.02 2.66.0, 26.03 2.67.0, 26.04 2.68.0, 26.05 2.69.0, 26.06 2.70.0, 26.07 2.71.0
"""

Release = tuple[int, int]  # year and month, as (24, 10)


@dataclass(frozen=True)
class Advisory:
    cve: str
    fixed_in: Release
    severity: str
    bulletin: int


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def name_of(release: Release) -> str:
    return f"{release[0]:02}.{release[1]:02}"


def _read(entry: str) -> Advisory:
    cve, fixed_in, severity, bulletin = entry.split()
    year, month = _numbers(fixed_in)
    return Advisory(cve, (year, month), severity, int(bulletin))


ADVISORIES: Sequence[Advisory] = tuple(_read(entry) for entry in _LIST.strip().splitlines())
ALL_FIXED_IN = max(advisory.fixed_in for advisory in ADVISORIES)
_BY_VERSION = {_numbers(version): _numbers(release) for release, version in map(str.split, _VERSIONS.split(","))}


def release_of(version: str) -> Release | None:
    """Returns the release of a version such as `2.51.0`, or of a release's name such as `25.07-py3`; None if it is neither.

    A version that is not listed counts as the newest listed one before it, or as the oldest listed one.
    """
    try:
        numbers = _numbers(version.strip().partition("-")[0])
    except ValueError:
        return None
    if numbers[0] == 2:
        numbers = _BY_VERSION[max((known for known in _BY_VERSION if known <= numbers), default=min(_BY_VERSION))]
    return (numbers[0], numbers[1]) if len(numbers) == 2 and numbers[0] > 2 else None


def open_in(release: Release) -> list[Advisory]:
    """Returns the advisories that this release does not fix."""
    return [advisory for advisory in ADVISORIES if release < advisory.fixed_in]
