from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hplm.errors import InvalidInput
from hplm.simulate.arrivals import SECOND
from loadtest.texts import TextSource, read_texts
from loadtest.traffic import Mix, burst, fixed, gamma, lengths_of, read_recorded, steady, texts_for, until
from testing.toy import WORDS
from tests.support.message import mentioning


def seconds(arrivals) -> np.ndarray:
    return arrivals.at_ns / SECOND


def test_steady_and_burst_are_those_of_the_paper() -> None:
    """Each tenant sends once a period, at its own moment; in a burst a user starts every 0.05 s."""
    arrivals = steady(Mix(50))
    own = [seconds(arrivals)[arrivals.tenant == tenant] for tenant in range(50)]
    assert all(len(one) == 100 and np.allclose(np.diff(one), 20) for one in own) and np.ptp([one[0] for one in own]) > 10
    arrivals = burst(Mix(10))
    assert len(arrivals) == 12_500 and seconds(arrivals)[-1] == pytest.approx(249 * 0.05 + 49 * 1.2)
    assert np.allclose(np.diff(seconds(arrivals)[seconds(arrivals) < 1.19]), 0.05) and set(arrivals.tenant) == set(range(10))


@pytest.mark.parametrize("cv", [0.5, 3.0])
def test_gaps_have_the_given_rate_and_variation(cv) -> None:
    gaps = np.diff(seconds(gamma(Mix(), rate=100, seconds=200, cv=cv, seed=2)))
    assert (1 / gaps.mean(), gaps.std() / gaps.mean()) == pytest.approx((100, cv), rel=0.1) and 190 < gaps.sum() < 200


def test_zipf_lengths_deadlines_and_ends() -> None:
    arrivals = gamma(Mix(20, 1.0, lengths_of("normal:20,100"), (50, 150)), rate=1000, seconds=20)
    counts = np.bincount(arrivals.tenant, minlength=20)
    assert counts[0] / counts[4] == pytest.approx(5, rel=0.2)
    assert arrivals.tokens.mean() == pytest.approx(20, abs=0.5) and arrivals.tokens.std() == pytest.approx(10, rel=0.1)
    assert arrivals.allowed_ns.min() >= 50e6 and arrivals.allowed_ns.max() <= 150e6
    cut = until(arrivals, 5.0)
    assert seconds(cut)[-1] < 5 and len(cut.tokens) == len(cut) == (seconds(arrivals) < 5).sum()
    assert set(Mix(lengths=fixed(128)).draw(np.zeros(5), None, np.random.default_rng()).tokens) == {128}
    assert lengths_of("normal:20,100,5,512").most == 512


def test_texts_have_the_given_number_of_tokens(toy) -> None:
    tokenizer = toy.store.tokenizer()
    for text, length in zip(texts_for([3, 12, 60], WORDS), [3, 12, 60], strict=True):
        assert len(tokenizer.encode(text).tokens) == length
    texts = TextSource([" ".join(WORDS[i : i + 9]) for i in range(0, 180, 9)], toy.folder / "tokenizer.json")
    cut = {texts.of(20, number) for number in range(12)}
    assert {len(tokenizer.encode(text).tokens) for text in cut} == {20} and len(cut) > 8


def test_a_trace_keeps_known_tenants_and_replaces_unknown_ones(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"arrival": 12.5, "tokens": 9, "tenant": "x", "deadline_ms": 80},
        {"arrival": 10.0, "text": "some words here", "tenant": "beta"},
        {"arrival": 11.0, "tokens": 7, "tenant": "x"},
        {"arrival": 13.0, "tokens": 7, "tenant": "y"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recorded = read_recorded(path, ["acme", "beta"])
    assert seconds(recorded.arrivals).tolist() == [0, 1, 2.5, 3]
    assert recorded.texts == ["some words here", None, None, None] and recorded.arrivals.tokens.tolist() == [5, 7, 9, 7]
    assert recorded.arrivals.tenant.tolist() == [1, 0, 0, 1] and recorded.arrivals.allowed_ns[2] == 80e6
    for wrong in ('{"arrival": 1}', '{"arrival": 1, "tokens": 0}', '{"arrival": 1, "tokens": 9, "deadline_ms": -1}', "[]"):
        path.write_text(f"{wrong}\n")
        with pytest.raises(InvalidInput, match=mentioning(path, 1)):
            read_recorded(path, ["acme"])


NO_TEXTS = {"a.jsonl": (b'{"text": 5}', b'{"text": " "}', b'["text"]', b"text"), "a.txt": (b"caf\xe9", b"\n ")}


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in NO_TEXTS.items() for line in lines])
def test_a_file_without_texts_is_named(tmp_path: Path, name: str, line: bytes) -> None:
    (path := tmp_path / name).write_bytes(line)
    with pytest.raises(InvalidInput, match=mentioning(path)):
        read_texts([path])
