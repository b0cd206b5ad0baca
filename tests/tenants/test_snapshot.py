import json

import pytest

from hplm.errors import Broken, InvalidInput, NoTenant
from hplm.tenants.snapshot import Snapshot
from testing.toy import TENANTS
from tests.support.message import mentioning


def test_a_saved_snapshot_is_loaded_unchanged(toy, tmp_path):
    snapshot = Snapshot.load(toy.folder / "tenants.json")
    snapshot.save(tmp_path / "copy.json")
    again = Snapshot.load(tmp_path / "copy.json")
    assert again.tenants == snapshot.tenants and again.branches == snapshot.branches
    assert [tenant.id for tenant in again.tenants] == [tenant.id for tenant in TENANTS]
    assert again.find("echo").adapter is None and again.by_uid(1).id == "acme"
    assert again.banks() == [
        "bottleneck-4x2-attention_out+ffn_out-gelu-bf16.bank",
        "bottleneck-4x2.bank",
        "bottleneck-8x2.bank",
        "head-16-bf16.bank",
        "head-16.bank",
        "head-64.bank",
        "head2-16-tanh.bank",
        "lora-2x2-query+key+attention_out+ffn_in+ffn_out.bank",
        "lora-4x2.bank",
    ]


@pytest.mark.parametrize("tenant", [None, "", "ACME", "nobody", 7])
def test_unknown_and_missing_tenants_get_the_same_error(toy, tenant):
    with pytest.raises(NoTenant) as error:
        Snapshot.load(toy.folder / "tenants.json").find(tenant)
    assert error.value.wire().startswith("[no_tenant]")


def test_snapshots_that_cannot_be_read_are_named(toy, tmp_path):
    path = tmp_path / "tenants.json"
    with pytest.raises(InvalidInput, match=mentioning(path)):
        Snapshot.load(path)
    path.write_text("{")
    with pytest.raises(Broken, match=mentioning(path)):
        Snapshot.load(path)
    path.write_text(json.dumps({**json.loads((toy.folder / "tenants.json").read_text()), "format": 99}))
    with pytest.raises(InvalidInput, match=mentioning(path, 99)):
        Snapshot.load(path)
