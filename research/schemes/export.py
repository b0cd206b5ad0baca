"""Exports a store in another scheme: the same tenants, under the same name and with the same inputs and outputs.

A store has only adapters and heads, so bodies are pretrained ones. Speed and memory are those of the scheme, answers are not.
A model of a scheme in WHOLE keeps the bodies of some tenants in memory, and reads the others when they are needed.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from builder.learning.bodies import WholeBody
from builder.publish.export import Exported, check_export, copy_file, export, refuse_mixture
from builder.publish.model_configs import MAX_TEXTS, ServingOptions, template
from builder.store.branches import table_spec
from builder.store.store import Store, written_folder
from hplm.engine.backbone import Backbone
from hplm.engine.engine import INT8
from hplm.errors import InvalidInput
from hplm.model.checkpoint import load_checkpoint
from hplm.model.stacks import LowerStack
from hplm.model.weights import save_weights
from hplm.model.windows import Window
from hplm.plot.writing import write_table
from research.baselines.body import WholeModel
from research.baselines.models import WholeConfig, WholeTenant, files_of
from testing.random_store import RANDOM, random_backbone

NOTES = {
    "adapter": "All layers are the pretrained ones; adapters are the trained ones in the upper half, zero below it.",
    "shared": "All layers are the pretrained ones; heads were trained for other bodies.",
    "dedicated_inprocess": "Every tenant's body is the pretrained one, a copy each; heads were trained for other bodies.",
    "compressed": "Half of the pretrained layers, a copy each, not distilled; heads were trained for other bodies.",
}
FLAT = ("adapter", "shared")
WHOLE = ("dedicated_inprocess", "compressed")
OF_WHOLE = ("dtype", "device", "threads", "batch_tokens", "queue_texts")  # options that whole models also have
CONFIG = """\
# {name}: a baseline, scheme {scheme}, exported by `python -m research.schemes`. {note}
name: "{name}"
backend: "hplm_whole"
max_batch_size: {max_texts}

input [
  {{ name: "TEXT"       data_type: TYPE_STRING  dims: [ 1 ]  allow_ragged_batch: true }},
  {{ name: "TEXT_PAIR"  data_type: TYPE_STRING  dims: [ 1 ]  allow_ragged_batch: true  optional: true }}
]
output [
{answers}
]

instance_group [ {{ kind: KIND_MODEL  count: 1 }} ]
# The model has its own queue: requests that arrive while a batch runs become the next batch.
dynamic_batching {{ }}

"""
PARAMETER = 'parameters {{ key: "{}"  value {{ string_value: "{}" }} }}\n'


def export_scheme(
    store: Store, repository: Path, options: ServingOptions, scheme: str, resident: int = 20, replace: bool = False
) -> Exported:
    """Exports a store in another scheme. `resident`: models that a scheme without sharing keeps in memory."""
    if scheme not in NOTES:
        raise InvalidInput(f"unknown scheme {scheme!r}: choose {', '.join(NOTES)}")
    if resident < 1:
        raise InvalidInput(f"--resident {resident}: give 1 or more, because a model must be in memory to run")
    refuse_mixture(repository, store.config.name, scheme)
    if scheme in WHOLE:
        return _export_whole(store, repository, options, scheme, resident, replace)
    repository.mkdir(parents=True, exist_ok=True)
    # The scratch folder is on the repository's file system, for hard links.
    with tempfile.TemporaryDirectory(prefix=".scheme-", dir=repository) as scratch:
        flat = flat_store(store, Path(scratch) / "store", pretrained(store), with_adapters=scheme == "adapter")
        exported = export(flat, repository, options, replace)
    with open(repository / exported.backbone / "config.pbtxt", "a", encoding="utf-8") as file:
        file.write(f"\n# A baseline: {NOTES[scheme]}\n{PARAMETER.format('scheme', scheme)}")
    return exported


def _export_whole(
    store: Store, repository: Path, options: ServingOptions, scheme: str, resident: int, replace: bool
) -> Exported:
    check_export(store, options)
    tenants, name = store.tenants(), store.config.name
    given = [name for name, value in asdict(options).items() if value != getattr(ServingOptions, name) and name not in OF_WHOLE]
    if given:  # they have no slots, no scheduler and no locked tables
        raise InvalidInput(f"scheme {scheme!r} has no {', '.join(given)}: leave out these options")
    if options.dtype == INT8:
        raise InvalidInput(f"scheme {scheme!r} has no dtype int8, which is for layers that tenants share: choose fp32 or bf16")
    target = repository / name
    if (target / "1" / WholeConfig.FILE).exists() and not replace:
        raise InvalidInput(f"{repository} has an export of {name} already: give --replace, or name another --repository")
    body = pretrained(store)
    if scheme == "compressed":
        body = shorter(body, max(1, body.config.upper_layers // 2))
    parameters = {"scheme": scheme, "device": options.device, "dtype": options.dtype, "threads": options.threads}
    parameters |= {"batch_tokens": options.batch_tokens, "queue_requests": options.queue_texts, "resident": resident}
    shutil.rmtree(target, ignore_errors=True)
    with written_folder(target) as written:  # as `research.baselines.models` reads it; bodies are links to one file
        folder, listed = written / "1", list[WholeTenant]()
        (folder / "heads").mkdir(parents=True)
        body.save(folder / "body")
        for tenant in tenants:
            own, own_head = files_of(folder, tenant.id)
            copy_file(folder / "body", own)
            _, head = store.tenant_weights(tenant)
            save_weights({name: tensor.float() for name, tensor in head.items()}, own_head)
            labels = tuple(tenant.labels)
            listed.append(WholeTenant(tenant.id, tenant.version, tenant.task, labels, tenant.head_function, tenant.id))
        (folder / "body").unlink()
        body.config.save(folder / Backbone.CONFIG)
        copy_file(store.folder / Backbone.TOKENIZER, folder / Backbone.TOKENIZER)
        WholeConfig(tuple(listed)).save(folder)
        about = CONFIG.format(name=name, scheme=scheme, note=NOTES[scheme], max_texts=MAX_TEXTS, answers=template("answers"))
        (written / "config.pbtxt").write_text(about + "".join(PARAMETER.format(*one) for one in parameters.items()), "utf-8")
    return Exported(name, len(tenants), 0, target)


def pretrained(store: Store) -> WholeModel:
    """Returns the whole model as a backbone without lower layers: its lower half only gives each token its word's vector."""
    split = store.config
    layers = split.lower_layers + split.upper_layers
    whole = replace(split, lower_layers=0, upper_layers=layers, window=Window(1), entry_eps=None)
    if store.model == RANDOM:
        lower, upper = random_backbone(whole)
        weights = {"words.weight": lower.words.weight, **_upper(upper)}
    else:
        checkpoint = load_checkpoint(store.model, split.name, split.lower_layers, split.upper_layers)
        if checkpoint.skipbert:
            raise InvalidInput(
                f"{store.model!r} is a SkipBERT. Its lower layers were never trained on whole texts, so there is no whole BERT "
                "to export: use a store that was built from a plain BERT"
            )
        whole, given = replace(whole, upper_layers=checkpoint.total_layers), WholeBody(checkpoint)
        weights = {"words.weight": given.words.weight, **_upper(given)}
    body = WholeModel(whole)
    body.load_state_dict({name: weights[name] for name in body.state_dict()})
    return body


def _upper(stack: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {f"upper.{name}": weight for name, weight in stack.state_dict().items()}


def shorter(body: WholeModel, layers: int) -> WholeModel:
    """Returns a model of evenly chosen layers, the usual start of a distilled student (DistilBERT)."""
    found = WholeModel(replace(body.config, upper_layers=layers))
    found.load_state_dict({name: own for name, own in body.state_dict().items() if ".layers." not in name}, strict=False)
    for layer, source in zip(found.upper.layers, evenly(body.config.upper_layers, layers), strict=True):
        layer.load_state_dict(body.upper.layers[source].state_dict())
    return found


def evenly(total: int, count: int) -> list[int]:
    """Returns `count` of `total` layers, evenly chosen."""
    return [round((i + 0.5) * total / count - 0.5) for i in range(count)]


def flat_store(store: Store, folder: Path, whole: WholeModel, with_adapters: bool) -> Store:
    """Makes a store without precomputed layers, which the backends of hPLMs serve.

    All layers are upper layers. Its table has only single tokens, each with the vector of its word. Adapters are the trained
    ones in the upper half, and zeros below, which cost as much time.
    """
    tokenizer_json = (store.folder / "tokenizer.json").read_text("utf-8")
    flat = Store.create(folder, store.model, whole.config, tokenizer_json, LowerStack(whole.config), whole.upper)
    spec, words = table_spec(flat.config, "root", 1, None, "fp16", corpus_tokens=0), whole.words.weight

    def values_of(windows: np.ndarray) -> torch.Tensor:
        return words[torch.from_numpy(windows - 1)]

    write_table(flat.table_folder("root", 1), spec, flat.space.unigrams(), values_of)
    for tenant in store.tenants():
        adapter, head = store.tenant_weights(tenant)
        layout = tenant.adapter_layout(flat.config)
        if not with_adapters or adapter is None or layout is None:
            adapter = layout = None
        else:
            zeros = {name: torch.zeros(shape, dtype=layout.torch_dtype) for name, shape in layout.shapes.items()}
            adapter = [zeros] * (layout.layers - len(adapter)) + adapter
        known = replace(tenant, domain="root", domain_version=1, rank=tenant.rank if adapter else 0)
        flat.save_tenant(known, adapter, head, {})
    return flat
