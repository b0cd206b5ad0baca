"""`dedicated`, `dedicated_inprocess` and `compressed`: each tenant has a copy of all layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from builder.publish.export import copy_file
from builder.publish.model_configs import MAX_TEXTS
from builder.store.store import Store, TenantFile, written_folder
from hplm.model.weights import save_weights
from research.baselines.body import save_body
from research.baselines.models import WholeConfig, WholeTenant, files_of
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
parameters { key: "queue_requests" value { string_value: "$queue_texts" } }  # more than these are refused: [queue_full]
parameters { key: "resident"      value { string_value: "$resident" } }      # models kept in memory; others are read over them
""")


def write_whole(
    target: Path,
    store: Store,
    model: Pretrained,
    tenants: Sequence[TenantFile],
    about: WholeConfig,
    parameters: Mapping[str, object],
    body: Path | None = None,
) -> Path:
    """Writes a Triton model with these tenants: the files that `research.baselines.models` reads, and `config.pbtxt`.

    The bodies of all tenants are equal, also in the next model: one file with hard links. `body`: the file, if it is written
    already. Returns it.
    """
    with written_folder(target) as written:
        folder = written / "1"
        (folder / "bodies").mkdir(parents=True)
        (folder / "heads").mkdir()
        model.config.save(folder / "backbone.json")
        copy_file(store.folder / "tokenizer.json", folder / "tokenizer.json")
        for tenant in tenants:
            own, own_head = files_of(folder, tenant.id)
            if body is None:
                save_body(model.config, model.weights, own)
            else:
                copy_file(body, own)
            body = body or own
            _, head = store.tenant_weights(tenant)
            save_weights({name: tensor.float() for name, tensor in head.items()}, own_head)
        listed = tuple(
            WholeTenant(one.id, one.version, one.task, tuple(one.labels), one.head_function, one.id) for one in tenants
        )
        WholeConfig(about.scheme, about.note, listed).save(folder)
        values = {"name": target.name, "scheme": about.scheme, "note": about.note, "max_texts": MAX_TEXTS, **parameters}
        (written / "config.pbtxt").write_text(_CONFIG.substitute(values), "utf-8")
    return files_of(target / "1", tenants[0].id)[0]
