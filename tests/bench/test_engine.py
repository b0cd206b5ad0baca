import numpy as np
import pytest
import torch

from bench.engine import EngineBench
from bench.measuring.engine import TEXTS, bench_engine, table_of
from bench.measuring.layer_runs import LayerRuns
from bench.measuring.onnx_whole import OnnxWhole, missing_packages
from bench.measuring.text_lengths import batches_of, filling, padding
from hplm.engine.packing import Concat, Naive, Packed
from testing.toy import CONFIG
from tests.support.message import mentions

pytestmark = pytest.mark.slow


def test_lengths_are_distributed_as_in_the_paper():
    for variance in (20, 100):
        lengths = np.concatenate(batches_of(TEXTS, variance))
        assert lengths.min() >= 3 and lengths.max() <= 100
        assert lengths.mean() == pytest.approx(20, abs=2)
        assert lengths.var() == pytest.approx(variance, rel=0.3)
    assert 900 < filling(1000, 20).sum() <= 1000


def test_padding_is_the_share_of_rows_without_text():
    batches = [np.array([10, 5, 5])]
    assert padding(Packed(), batches) == 0
    assert padding(Naive(), batches) == pytest.approx(1 / 3)
    assert padding(Concat(4, 10), batches) == 0


def test_every_figure_is_there(monkeypatch):
    pytest.importorskip("transformers", reason="comes with the extra 'build'")
    monkeypatch.setattr("bench.measuring.engine.SIZES", {"minilm": CONFIG})
    monkeypatch.setattr("bench.measuring.engine.SLOT_ROWS", (2,))
    figures = bench_engine(EngineBench(("minilm",), 0.01, "fp32"))
    for name in ("naive", "turbo", "concat", "slotted", "packed", "uniform"):
        assert figures["minilm"]["var20"][name] > 0 and figures["minilm"]["var100"][name] > 0
    for kind in ("within", "causal", "cross"):
        assert all(rate > 0 for rate in figures["masks"][kind].values()) and len(figures["masks"][kind]) == 5
    assert set(figures["minilm"]["one"]) == {"128", "512"}
    assert all(figure > 0 for figure in figures["minilm"]["sizes"].values())
    assert all(set(of) == {"32", "94", "256", "1024"} for of in figures["minilm"]["attention_kernel"].values())
    assert figures["dtype"] == "float32"
    in_eight_bits = figures["minilm"]["int8"]
    assert figures["int8_over_fp32"] == min(in_eight_bits[name]["int8_over_fp32"] for name in ("one", "batch"))
    assert "packed / uniform" in table_of(figures)


def test_products_in_eight_bits_are_measured_alone(monkeypatch):
    monkeypatch.setattr("bench.measuring.engine.SIZES", {"minilm": CONFIG})
    monkeypatch.setattr("bench.measuring.engine.missing_packages", lambda: ["onnx"])
    figures = bench_engine(EngineBench(("minilm",), 0.01, "fp32", only_int8=True))
    assert figures["minilm"].keys() == {"int8"} and figures["int8_over_fp32"] > 0
    assert mentions(table_of(figures), "int8_over_fp32", "onnx")


def test_the_adapters_of_the_benchmark_change_the_answers():
    runs = LayerRuns(CONFIG, torch.device("cpu"), torch.float32, 0.01)
    adapters = runs.adapters(np.arange(2), np.array([3, 4]))
    assert len(adapters) == CONFIG.upper_layers
    before, after = torch.zeros(7, CONFIG.hidden), torch.ones(7, CONFIG.hidden)
    with torch.inference_mode():
        assert not torch.equal(adapters[0]("attention_out", before, after.clone()), after)
        assert torch.equal(adapters[0]("qkv", before, after), after)


@pytest.mark.skipif(bool(missing_packages()), reason=f"{' and '.join(missing_packages())} are not installed")
def test_the_whole_model_of_onnx_runtime_is_quantised_and_has_every_layer():
    whole = OnnxWhole(CONFIG, threads=1)
    assert whole.layers == CONFIG.lower_layers + CONFIG.upper_layers
    assert whole.products == 4 * whole.layers
    assert whole.run(whole.inputs(2, 5)).shape == (2, 5, CONFIG.hidden)
