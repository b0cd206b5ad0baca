"""Imported adapters of `peft` and `adapters` give the numbers that those libraries computed with them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from builder.importing.lower import NewDomain, merge
from builder.importing.tenant import ImportOptions, import_tenant, read_folder
from builder.store.store import Store, TenantFile
from builder.training.model import TenantModel
from hplm.adapters.tiles import Tiles
from hplm.errors import InvalidInput
from hplm.model import stacks
from hplm.model.attention import PackedAttention
from hplm.model.layer import Layers
from tests.builder.importing.stores import FIXTURES, LABELS, changed, put
from tests.builder.stores import SMALL, corpus
from tests.support.device import DEVICE
from tests.support.message import mentioning

pytestmark = pytest.mark.slow

UPPER_ONLY = sorted(path.name for path in FIXTURES.iterdir() if not path.name.endswith(("-lower", "-refused")))


def expected(name: str) -> dict[str, torch.Tensor]:
    stored = json.loads((FIXTURES / name / "expected.json").read_text())
    return {part: torch.tensor(numbers) for part, numbers in stored.items()}


def through(layers: Layers, x: torch.Tensor, store: Store, model: TenantModel | None = None) -> torch.Tensor:
    """Returns the hidden states of one sequence after these layers, with the adapter of a tenant."""
    one = Tiles(np.zeros(len(x), dtype=np.int64), DEVICE)
    return stacks.through(layers, x, PackedAttention([len(x)], store.config.heads), model and model.adapts(one, one))


def check_upper_half(store: Store, tenant: TenantFile, name: str) -> None:
    """Computes last hidden states and logits from the library's states at the split, by what was stored in 16 bits."""
    wanted, layers = expected(name), store.upper().layers
    layouts = tenant.adapter_layout(store.config), tenant.head_layout(store.config)
    model = TenantModel.of(*layouts, *store.tenant_weights(tenant))
    with torch.no_grad():
        end, bare = through(layers, wanted["split"], store, model), through(layers, wanted["split"], store)
        logits = model.read(end if tenant.task == "tag" else end[:1])
    assert (end - wanted["end"]).abs().max() < 5e-3 and (bare - wanted["end"]).abs().max() > 0.05
    assert logits.shape == wanted["logits"].shape and (logits - wanted["logits"]).abs().max() < 5e-3


@pytest.mark.parametrize("name", UPPER_ONLY)
def test_the_upper_half_equals_the_librarys(store, name):
    options = ImportOptions(labels=LABELS if name.startswith("peft") else None)
    tenant, report = import_tenant(store, "acme", FIXTURES / name, options, DEVICE)
    assert tenant == store.tenants()[0] and (tenant.labels, tenant.version) == (LABELS, 1)
    assert report["imported"]["trained_on"] == "tiny-bert" and store.report(tenant) == report
    check_upper_half(store, tenant, name)


def test_labels_that_may_all_hold_are_multilabel(store, tmp_path):
    """Whether the model's configuration, AdapterHub's head or the user says so."""
    problem = {"problem_type": "multi_label_classification"}
    for tenant_id, folder in (
        ("peft", changed(tmp_path, "peft-everywhere", "config.json", id2label=dict(enumerate(LABELS)), **problem)),
        ("stock", changed(tmp_path, "adapters-stock-head", "config.json", **problem)),
        ("own", changed(tmp_path, "adapters-double", "head_config.json", head_type="multilabel_classification")),
        ("told", FIXTURES / "peft-pooler"),
    ):
        options = ImportOptions(**({"task": "multilabel", "labels": LABELS} if tenant_id == "told" else {}))
        tenant, _ = import_tenant(store, tenant_id, folder, options, DEVICE)
        assert (tenant.task, tenant.labels) == ("multilabel", LABELS), tenant_id


def cut_to_one(path: Path, names: str) -> None:
    """Leaves the first row of a head's weights."""
    is_safe = path.suffix == ".safetensors"
    tensors = load_file(path) if is_safe else torch.load(path)
    tensors |= {names + part: tensors[names + part][:1].clone() for part in ("weight", "bias")}
    (save_file if is_safe else torch.save)(tensors, path)


@pytest.mark.parametrize("config", [{"problem_type": "regression"}, {}])
def test_a_single_output_is_a_value(store, tmp_path, config):
    """Both libraries train it so, even if their files do not say it. Without a task the user must."""
    peft = changed(tmp_path, "peft-everywhere", "config.json", id2label={0: "LABEL_0"}, **config)
    hub = changed(tmp_path, "adapters-double")
    cut_to_one(peft / "adapter_model.safetensors", "base_model.model.classifier.")
    cut_to_one(hub / "pytorch_model_head.bin", "heads.acme.4.")
    for tenant_id, folder in (("peft", peft), ("hub", hub)):
        tenant, _ = import_tenant(store, tenant_id, folder, ImportOptions(), DEVICE)
        assert (tenant.task, tenant.labels) == ("regress", ["value"])
    put(peft / "adapter_config.json", task_type=None, auto_mapping=None)
    if not config:
        with pytest.raises(InvalidInput, match=mentioning("--task", "classify", "multilabel", "regress", "tag")):
            import_tenant(store, "acme", peft, ImportOptions(), DEVICE)
    tenant, _ = import_tenant(store, "acme", peft, ImportOptions(task="regress"), DEVICE)
    assert (tenant.task, tenant.labels) == ("regress", ["value"])


def test_another_import_is_the_next_version_and_keeps_the_labels(store):
    """Clients know logits by the order of labels, so rows of another order are moved."""
    first, again = ImportOptions(labels=LABELS), ImportOptions(labels=["green", "red", "blue"])
    import_tenant(store, "acme", FIXTURES / "peft-everywhere", first, DEVICE)
    update, _ = import_tenant(store, "acme", FIXTURES / "peft-pooler", again, DEVICE)
    assert (update.version, update.labels) == (2, LABELS)
    head, stored_head = read_folder(FIXTURES / "peft-pooler", store.model, None).head, store.tenant_weights(update)[1]
    for part in ("weight", "bias"):
        assert torch.equal(stored_head[part], head.weights[part].half()[[1, 0, 2]])
    assert torch.equal(stored_head["dense"], head.weights["dense"].half())
    with pytest.raises(InvalidInput, match=mentioning("'acme'", "['a', 'b', 'c']", "--id")):
        import_tenant(store, "acme", FIXTURES / "peft-pooler", ImportOptions(labels=["a", "b", "c"]), DEVICE)
    with pytest.raises(InvalidInput, match=mentioning("'acme'", "classify", "tag", "--id")):
        import_tenant(store, "acme", FIXTURES / "adapters-lora-tag", ImportOptions(), DEVICE)


def test_a_lower_part_becomes_a_domain(store, tmp_path):
    new = NewDomain("acme-lower", [corpus(tmp_path, 1)], SMALL)
    options = ImportOptions(labels=LABELS, new_domain=new)
    tenant, report = import_tenant(store, "acme", FIXTURES / "peft-lower", options, DEVICE)
    assert (tenant.domain, tenant.domain_version, tenant.rank) == ("acme-lower", 1, 2)
    check_upper_half(store, tenant, "peft-lower")
    table = store.table("acme-lower", 1)
    assert table.meta.parent_branch == ("root", 1)
    megabytes = sum(file.stat().st_size for file in table.folder.iterdir()) / 1e6
    assert report["merged"].pop("mb") == pytest.approx(megabytes, rel=0.05)
    assert report["merged"] == {"domain": "acme-lower", "layers": [0, 1], "ngrams": table.meta.keys}
    window = torch.tensor(table.space.unpack(table.index.by_row()[:50]).astype(np.int64))
    rows, library = torch.stack([table.rows.vectors(i + 1) for i in range(50)]), expected("peft-lower")
    merge(merged := store.lower("root", 1), read_folder(FIXTURES / "peft-lower", store.model, None).halves(store.config)[0])
    with torch.no_grad():
        for lower in (merged, store.lower("root", 1)):
            assert ((rows - lower(window)).abs().max() < 0.01) == (lower is merged)
            found = through(lower.layers, library["start"], store)
            assert ((found - library["split"]).abs().max() < 1e-4) == (lower is merged)
    with pytest.raises(InvalidInput, match=mentioning("'acme-lower'", store.folder, "--as-domain")):
        import_tenant(store, "acme", FIXTURES / "peft-lower", options, DEVICE)
