"""Where the tokens of sequences are. `test_decoder_machine.py` shows that each sequence keeps what was written to it."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hplm.errors import InvalidInput
from hplm.generation.cache import BLOCK, CUDA_BLOCK, Cache, least_tokens, places_of, table_of
from tests.support.message import mentioning

LONGEST = 512


def test_places_of_several_sequences_lie_end_to_end():
    found = places_of(table_of([(2, 0), (4,), (1, 3)]), 32, np.array([30, 5, 0]), np.array([4, 2, 33]))
    assert found.tolist() == [94, 95, 0, 1, 133, 134, *range(32, 64), 96]


@pytest.mark.parametrize(("device", "block"), [("cpu", BLOCK), ("cuda", CUDA_BLOCK)])
def test_a_cache_has_a_block_of_its_device_at_least(device, block):
    device = torch.device(device)
    with FakeTensorMode():  # there need be no GPU
        assert Cache(block, LONGEST, 1, 1, device).block == block
        assert Cache(2 * LONGEST, LONGEST, 1, 1, device).take(LONGEST + 1) is None, "no sequence is so long"
    with pytest.raises(InvalidInput, match=mentioning(block - 1, block)):
        Cache(block - 1, LONGEST, 1, 1, device)
    assert least_tokens(LONGEST - 1) == least_tokens(LONGEST) == 512
