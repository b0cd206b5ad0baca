"""The benchmark of generation, small: every part gives its figures."""

import math

import pytest

from bench.generate import PARTS, GenerateBench
from bench.measuring.generate import bench_generate, table_of

pytestmark = pytest.mark.slow

TOY = GenerateBench(
    3, hidden=192, vocabulary=300, prompts=4, prompt_tokens=8, tenants=40, dedicated=30, resident=3, rounds=1, seconds=1.0
)
KEYS = {
    "full_over_transformers", "one_stream_over_transformers", "decode_ratio", "decode_bound", "first_token_ratio",
    "cleaning_ratio", "cleaning_first_token", "tenants_40_over_32", "distinct_32_over_1", "lookup_share", "staging_share",
    "paged_over_slotted", "paged_places_over_slotted", "swapped_ratio", "swapped_loads", "served_tokens_s",
    "served_over_bare", "cancel_ms", "cancel_bound_ms", "overload_on_time", "overload_refused", "refusal_p99_ms",
}  # fmt: skip


def test_every_part_gives_its_figures():
    figures = bench_generate(TOY, PARTS)
    assert figures.keys() >= KEYS
    assert all(math.isfinite(figures[key]) and figures[key] >= 0 for key in KEYS)
    assert 0 < figures["lookup_share"] < figures["staging_share"] < 1
    assert figures["decode_bound"] > 1
    assert all(key in table_of(figures) for key in KEYS)
