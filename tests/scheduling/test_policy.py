import numpy as np
import pytest

from hplm.errors import InvalidInput
from hplm.scheduling.columns import Columns
from hplm.scheduling.policy import policy
from hplm.scheduling.simulation.arrivals import SimulatedText
from tests.support.message import mentioning


def test_an_unknown_policy_is_named():
    with pytest.raises(InvalidInput, match=mentioning("horizon=2.5", 255)):
        policy("timely:horizon=2.5")
    with pytest.raises(InvalidInput, match="'lifo'"):
        policy("lifo")
    with pytest.raises(InvalidInput, match=mentioning("texts=2.5")):
        policy("length_aware:texts=2.5")


def test_columns_grow_and_close_their_gaps():
    texts = [SimulatedText(tokens=i + 1, arrival_ns=i, slot_key=i % 7, tenant=i % 3) for i in range(3000)]
    columns = Columns(texts)
    out = columns.remove(np.array([5, 2999, 0]))
    assert out == [texts[5], texts[2999], texts[0]]
    assert (
        columns.tokens.tolist() == [text.tokens for text in [columns.text(i) for i in range(len(columns))]]
        and len(columns) == 2997
    )
    assert columns.slot_keys == 7 and columns.tenants == 3
    assert columns.demand.tolist() == [columns.tokens[columns.tenant == tenant].sum() for tenant in range(3)]
