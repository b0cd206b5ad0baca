from __future__ import annotations

import json

import pytest
import torch

from bench.adapters import AdaptersBench
from bench.measuring import adapters as bench_adapters
from bench.measuring.adapters import TOKENS, WITHOUT_PEFT, table_of, variants
from hplm.cli.main import main

pytestmark = pytest.mark.slow

TINY = AdaptersBench(hidden=32, rank=16, seconds=0.005, tenants=(1, 16))


@pytest.mark.parametrize("tenants", [1, 5])
def test_all_variants_compute_the_same(tenants: int) -> None:
    with_peft = bench_adapters.has_peft()
    results = {}
    for name, variant in variants(TINY, tenants, 7, with_peft).items():
        results[name] = variant.rows.after.clone()
        with torch.inference_mode():
            variant.run(results[name])
        assert not torch.equal(results[name], variant.rows.after), name
    torch.testing.assert_close(results["grouped"], results["loop"], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(results["grouped_lora"], results["loop_lora"], atol=1e-4, rtol=1e-4)
    if with_peft:
        torch.testing.assert_close(results["peft"], results["loop_lora"], atol=1e-4, rtol=1e-4)


def test_without_peft_its_figures_are_null_and_the_table_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_adapters, "has_peft", lambda: False)
    figures = bench_adapters.bench_adapters(TINY)
    for tokens in TOKENS:
        for tenants in ("1", "16"):
            one = figures[f"t{tokens}"][tenants]
            assert one["grouped_us"] > 0 and one["loop_us"] > 0 and one["peft_us"] is None
            assert one["layer_us"] > 0 and one["layer_bottleneck"] > 0 and one["layer_lora"] > 0
    printed = table_of(json.loads(json.dumps(figures)))
    assert WITHOUT_PEFT in printed
    assert printed.count("met") + printed.count("MISSED") == 2 * len(TOKENS)


def test_the_command_prints_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "adapters", "--json", "--hidden", "32", "--rank", "4", "--seconds", "0.002"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(figures["t128"]) == {"1", "4", "16", "64"}
