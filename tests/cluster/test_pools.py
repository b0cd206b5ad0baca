"""Cores are divided among replicas."""

from pathlib import Path

import pytest

from hplm.cluster.pools import replicas_of
from hplm.errors import InvalidInput

HERE = Path("repository")


def test_each_replica_gets_as_many_cores():
    assert [replica.cores for replica in replicas_of(HERE, 2, (0, 1, 2, 3))] == [(0, 1), (2, 3)]
    assert [replica.cores for replica in replicas_of(HERE, 2)] == [(), ()]
    assert [(replica.id, replica.name) for replica in replicas_of(HERE, 2)] == [(1, "replica-1"), (2, "replica-2")]


@pytest.mark.parametrize("count, cores, what", [(0, (), "replicas 0"), (3, (0, 1), "2 cores for 3"), (2, (0, 0), "twice")])
def test_what_cannot_be_divided_is_refused(count, cores, what):
    with pytest.raises(InvalidInput, match=what):
        replicas_of(HERE, count, cores)
