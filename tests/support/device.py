"""The device of tests whose answers must not depend on it. `HPLM_TEST_DEVICE=cuda ./run test` runs them on a GPU."""

import os

import pytest
import torch

DEVICE = torch.device(os.environ.get("HPLM_TEST_DEVICE", "cpu"))
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
DTYPES = ["fp32", "bf16", *["int8"] * (DEVICE.type == "cpu")]  # of engines on this device
