"""The soak compares what processes take at the beginning and at the end. `tests/bench` runs it on a real server."""

from loadtest.soak import growth

MEMORY = [50, 90, 100, 100, 100, 100, 100, 100, 100, 100, 120, 120]  # MB after each window


def test_growth_compares_the_time_after_the_warm_up_with_the_end():
    found = growth([{"engine": (taken * 10**6, 10 + at)} for at, taken in enumerate(MEMORY)])
    assert found["memory_growth"] == {"engine": 0.2} and found["memory_mb"] == {"engine": 120.0}
    assert found["files_growth"] == {"engine": 8}  # medians of the samples 2 and 3, and 10 and 11
