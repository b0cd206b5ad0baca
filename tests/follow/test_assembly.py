"""The next snapshot of a copy, without files: what is gone, what is kept, and what is not there yet."""

from dataclasses import replace

import pytest

from hplm.adapters.record import Record
from hplm.follow.assembly import assemble
from hplm.plot.branch import Branch
from hplm.tenants.keys import new_key
from hplm.tenants.snapshot import Snapshot, Tenant

ROOT, LAW, LAW2 = Branch("root", 1, 0), Branch("law", 1, 100), Branch("law", 2, 200)
KEY, SECOND = new_key()[1], new_key()[1]


def tenant(name, uid=1, version=1, branch=ROOT, **fields):
    head = Record("state/there.bank", uid, uid, version)
    return Tenant(name, uid, version, branch.domain, branch.version, "classify", ("a", "b"), head, None, **fields)


def local(tenant):
    return replace(tenant, head=replace(tenant.head, bank="state/here.bank"))


def joined(wanted, here, branches=(ROOT,), tables=(), records=None):
    """`here`: the copy's tenants. `tables`: those that are here. `records`: tenants and versions whose records are here."""
    tables = set(tables) or {ROOT, *branches}
    found = {(one.id, one.uid, one.version) for one in wanted} if records is None else records
    return assemble(
        Snapshot(9, branches, wanted, "x"),
        Snapshot(4, [branch for branch in (ROOT, LAW, LAW2) if branch in tables], [local(one) for one in here], "x"),
        lambda branch: branch in tables,
        lambda branch: ("root", 1) if branch.domain == "law" else None,
        lambda one: local(one) if (one.id, one.uid, one.version) in found else None,
    )


def test_a_tenant_keeps_its_version_and_gets_the_new_keys_and_limits():
    wanted = tenant("a", version=2, keys=(SECOND,), rate=5.0)
    made = joined([wanted], [tenant("a", keys=(KEY, SECOND), in_flight=3)], records=set())
    (kept,) = made.tenants
    assert (kept.version, kept.keys, kept.rate, kept.in_flight) == (1, (SECOND,), 5.0, 0)
    assert kept.head.bank == "state/here.bank" and not made.is_whole


def test_another_tenant_of_the_same_name_does_not_get_the_old_knowledge():
    made = joined([tenant("a", uid=7)], [tenant("a", uid=1)], records=set())
    assert made.tenants == () and not made.is_whole


@pytest.mark.parametrize("tables", [{ROOT}, {ROOT, LAW}])
def test_a_tenant_waits_for_its_table(tables):
    made = joined([tenant("a", branch=LAW2)], [], (ROOT, LAW, LAW2), tables)
    assert made.tenants == () and LAW2 not in made.branches and not made.is_whole


def test_an_old_table_stays_while_a_tenant_needs_it():
    """The source has removed the old version, because all tenants have moved to the new one."""
    wanted = tenant("a", version=2, branch=LAW2)
    made = joined([wanted], [tenant("a", branch=LAW)], (ROOT, LAW2), {ROOT, LAW})
    assert made.branches == (ROOT, LAW) and [one.version for one in made.tenants] == [1]
    made = joined([wanted], [tenant("a", branch=LAW)], (ROOT, LAW2), {ROOT, LAW, LAW2})
    assert made.branches == (ROOT, LAW2) and [one.version for one in made.tenants] == [2] and made.is_whole


def test_a_table_of_the_same_name_takes_the_place_of_the_old_one():
    """A version may only be looked up in the table that it was made for."""
    again = Branch("law", 1, 300)
    wanted = tenant("a", version=3, branch=again)
    made = joined([wanted], [tenant("a", branch=LAW)], (ROOT, again), {ROOT, LAW, again}, records=set())
    assert made.branches == (ROOT, again) and made.tenants == () and not made.is_whole
    made = joined([wanted], [tenant("a", branch=LAW)], (ROOT, again), {ROOT, LAW}, records=set())
    assert made.branches == (ROOT, LAW) and [one.version for one in made.tenants] == [1]
