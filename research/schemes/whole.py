"""`dedicated`, `dedicated_inprocess` and `compressed`: each tenant has a copy of all layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import Template

import torch

from builder.publish.export import copy_file
from builder.publish.model_configs import MAX_TEXTS, ServingOptions
from builder.store.store import Store, TenantFile, written_folder
from hplm.model.weights import save_weights
from research.baselines.body import Body, weights_of_linear
from research.baselines.models import WholeConfig, WholeTenant
from research.schemes.pretrained import Pretrained

_CONFIG = Template("""\
# $name: a baseline, scheme $scheme, exported by `python -m research.schemes`. $note
name: "$name"
backend: "hplm_whole"
max_batch_size: $max_texts

input [
  { name: "TEXT"       data_type: TYPE_STRING  dims: [ 1 ]  allow_ragged_batch: true },
  { name: "TEXT_PAIR"  data_type: TYPE_STRING  dims: [ 1 ]  allow_ragged_batch: true  optional: true }
]
output [
  { name: "LABEL"       data_type: TYPE_STRING  dims: [ -1 ] },
  { name: "SCORE"       data_type: TYPE_FP32    dims: [ -1 ] },
  { name: "LOGITS"      data_type: TYPE_FP32    dims: [ -1, -1 ] },
  { name: "SPAN"        data_type: TYPE_INT32   dims: [ -1, 2 ] },
  { name: "CONFIDENCE"  data_type: TYPE_FP32    dims: [ 1 ] },
  { name: "LEVEL"       data_type: TYPE_INT32   dims: [ 1 ] },
  { name: "VERSION"     data_type: TYPE_STRING  dims: [ 1 ] }
]

instance_group [ { kind: KIND_MODEL  count: 1 } ]
# The model has its own queue: requests that arrive while a batch runs become the next batch.
dynamic_batching { }

parameters { key: "scheme"        value { string_value: "$scheme" } }
parameters { key: "device"        value { string_value: "$device" } }        # auto, cpu, cuda, cuda:1, ...
parameters { key: "dtype"         value { string_value: "$dtype" } }         # auto: bf16 where the hardware has it, else fp32
parameters { key: "threads"       value { string_value: "$threads" } }       # 0: all cores (CPU only)
parameters { key: "batch_tokens"  value { string_value: "$batch_tokens" } }  # at most this many tokens a batch
parameters { key: "queue_requests" value { string_value: "$queue_requests" } }  # more than these are refused: [queue_full]
parameters { key: "resident"      value { string_value: "$resident" } }      # models kept in memory; others are read over them
""")


class WholeFolder:
    """Writes folders of Triton models: the files that `research.baselines.models` reads, and `config.pbtxt`."""

    def __init__(self, store: Store, model: Pretrained, scheme: str, note: str, resident: int, options: ServingOptions) -> None:
        self._store, self._model = store, model
        self._scheme, self._note = scheme, note
        self._resident, self._options = resident, options
        self._body: Path | None = None

    def write(self, target: Path, tenants: Sequence[TenantFile]) -> None:
        """Writes a model folder. The bodies of all tenants are equal, also in the next model: one file with hard links."""
        with written_folder(target) as model:
            folder = model / "1"
            (folder / "bodies").mkdir(parents=True)
            (folder / "heads").mkdir()
            self._model.config.save(folder / "backbone.json")
            copy_file(self._store.folder / "tokenizer.json", folder / "tokenizer.json")
            first = self._body
            for tenant in tenants:
                body = folder / "bodies" / f"{tenant.id}.safetensors"
                if first is None:
                    save_weights(_body_weights(self._model), body)
                else:
                    copy_file(first, body)
                first = first or body
                _, head = self._store.tenant_weights(tenant)
                weights = {name: tensor.float() for name, tensor in head.items()}
                save_weights(weights, folder / "heads" / f"{tenant.id}.safetensors")
            listed = tuple(
                WholeTenant(one.id, one.version, one.task, tuple(one.labels), one.head_function, one.id) for one in tenants
            )
            WholeConfig(self._scheme, self._note, listed).save(folder)
            (model / "config.pbtxt").write_text(self._config_text(target.name), "utf-8")
        self._body = target / "1" / "bodies" / f"{tenants[0].id}.safetensors"

    def _config_text(self, name: str) -> str:
        return _CONFIG.substitute(
            name=name,
            scheme=self._scheme,
            note=self._note,
            max_texts=MAX_TEXTS,
            device=self._options.device,
            dtype=self._options.dtype,
            threads=self._options.threads,
            batch_tokens=self._options.batch_tokens,
            queue_requests=self._options.queue_texts,
            resident=self._resident,
        )


def _body_weights(model: Pretrained) -> dict[str, torch.Tensor]:
    weights = {f"upper.{name}": tensor for name, tensor in model.upper.state_dict().items()}
    weights["words.weight"] = model.lower.words.weight
    with torch.device("meta"):
        turned = weights_of_linear(Body(model.config))
    return {name: (tensor.t() if name in turned else tensor).float() for name, tensor in weights.items()}
