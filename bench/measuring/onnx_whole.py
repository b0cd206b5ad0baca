"""A whole BERT in ONNX Runtime, in 8 bits: what a server without hPLM would compute for each text."""

from __future__ import annotations

import tempfile
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hplm.model.config import BackboneConfig

PACKAGES = ("onnx", "onnxruntime", "sympy")  # beside those of the extra `bench`: they may be in a folder on PYTHONPATH
OPSET = 17
PRODUCTS = ("MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QAttention")


def missing_packages() -> list[str]:
    return [name for name in PACKAGES if find_spec(name) is None]


class OnnxWhole:
    """All layers of a model with random weights: fused by ONNX Runtime's optimiser for BERT, then quantised by it."""

    def __init__(self, config: BackboneConfig, threads: int) -> None:
        import onnx  # pyright: ignore[reportMissingImports]
        import onnxruntime  # pyright: ignore[reportMissingImports]
        from onnxruntime.quantization import QuantType, quantize_dynamic  # pyright: ignore[reportMissingImports]
        from onnxruntime.transformers.optimizer import optimize_model  # pyright: ignore[reportMissingImports]

        self.layers = config.lower_layers + config.upper_layers
        self._vocabulary = config.vocabulary
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        with tempfile.TemporaryDirectory() as folder:
            exported, fused, quantised = (Path(folder) / f"{name}.onnx" for name in ("exported", "fused", "quantised"))
            _export(config, self.layers, exported)
            model = optimize_model(str(exported), "bert", num_heads=config.heads, hidden_size=config.hidden)
            model.save_model_to_file(str(fused))
            known = {"DefaultTensorType": onnx.TensorProto.FLOAT}  # of what the fused operators return
            quantize_dynamic(fused, quantised, per_channel=True, weight_type=QuantType.QInt8, extra_options=known)
            nodes = onnx.load(str(quantised)).graph.node
            self.products = sum(node.op_type in PRODUCTS for node in nodes)  # in 8 bits
            self._session = onnxruntime.InferenceSession(str(quantised), options, ["CPUExecutionProvider"])

    def inputs(self, texts: int, tokens: int) -> dict[str, np.ndarray]:
        ids = np.random.default_rng(1).integers(5, self._vocabulary, (texts, tokens))
        return {"ids": ids, "mask": np.ones_like(ids)}

    def run(self, inputs: dict[str, np.ndarray]) -> np.ndarray:
        return self._session.run(None, inputs)[0]


def _export(config: BackboneConfig, layers: int, path: Path) -> None:
    from transformers import BertConfig, BertModel

    bert_config = BertConfig(
        vocab_size=config.vocabulary,
        hidden_size=config.hidden,
        num_hidden_layers=layers,
        num_attention_heads=config.heads,
        intermediate_size=config.intermediate,
    )
    bert_config._attn_implementation = "eager"  # the form that the optimiser recognises

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = BertModel(bert_config, add_pooling_layer=False).eval()

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return self.bert(ids, mask).last_hidden_state

    ids = torch.randint(5, config.vocabulary, (2, 16))
    axes = {0: "texts", 1: "tokens"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Hidden(), (ids, torch.ones_like(ids)), str(path), input_names=["ids", "mask"], output_names=["hidden"],
            dynamic_axes={"ids": axes, "mask": axes, "hidden": axes}, opset_version=OPSET, dynamo=False,
        )  # fmt: skip
