"""The claims of the project: their commands exist, the pages say what was measured, beside their targets."""

from __future__ import annotations

import json
import shlex

import pytest

from bench import claims
from bench.run import of

KNOWN = claims.Claims.read()
MEASURED = json.loads((claims.ROOT / claims.RESULTS).read_text("utf-8"))


@pytest.mark.parametrize("one", KNOWN.measurements, ids=lambda one: one.command)
def test_the_command_of_a_claim_takes_its_options_and_what_it_watches_is_there(one: claims.Measurement) -> None:
    words = shlex.split(one.command)
    if picture := claims.picture_of(one.command):  # an option of all benchmarks
        assert (claims.ROOT / picture).parent == claims.ROOT / "docs/pictures"
        del words[words.index("--picture") : words.index(picture) + 1]
    if words[:2] == ["hplm", "bench"]:
        of("hplm bench", "bench", words[2])[1].parse_args(words[3:], exit_on_error=False, print_error=False)
        assert claims.watched(one)[-1] == f"bench/{words[2]}.py"
    assert all((claims.ROOT / path).exists() for path in one.watches) and one.figures and one.minutes > 0
    assert set(one.needs) <= set(KNOWN.needs)
    assert one.command not in MEASURED or set(MEASURED[one.command]["figures"]) == set(one.figures)


def test_the_pages_say_what_was_measured() -> None:
    assert set(MEASURED) <= {one.command for one in KNOWN.measurements}
    for page, figures in claims.PAGES.items():
        text = (claims.ROOT / page).read_text("utf-8")
        assert claims.filled(text, figures(KNOWN.measurements, MEASURED)) == text, "run `python -m bench.claims --write`"
    judged = [claims.verdict(*one) for one in ((0.9, "at least 0.9"), (0.89, "at least 0.9"), (None, "at most 5"), (1, ""))]
    assert judged == ["met", "missed", "missed", ""]
    assert claims.stale(KNOWN.measurements[0], {"commit": "of another clone"})
