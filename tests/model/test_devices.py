"""Products are divided among threads, torch computes where a kernel cannot, and a device that fails is told."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from hplm.adapters import kernel as of_adapters
from hplm.adapters.layout import Layout
from hplm.errors import Broken
from hplm.model import faults
from hplm.model import kernel as of_layers
from hplm.model.openmp import compute_with
from hplm.plot import kernel as of_tables
from testing.toy import WORDS
from tests.engine.asker import Asker

LOST, FULL, OTHER = (True, False), (False, True), (False, False)


@pytest.mark.parametrize(
    "error, expected",
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ..."), LOST),
        (RuntimeError("CUDA error: device-side assert triggered"), LOST),
        (RuntimeError("CUDA error: unspecified launch failure"), LOST),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"), LOST),
        (RuntimeError("HIP error: an illegal memory access was encountered"), LOST),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), FULL),
        (torch.AcceleratorError("CUDA error: out of memory"), FULL),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), FULL),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: ..."), FULL),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), OTHER),
        (Broken("CUDA error: told by somebody else"), OTHER),
        (ValueError("CUDA error: "), OTHER),
    ],
)
def test_a_fault_that_stays_is_told_from_a_full_device_and_from_other_errors(error, expected):
    assert (faults.stays(error), faults.is_out_of_memory(error)) == expected


def test_a_thread_has_a_number_of_its_own():
    before, all_have_set_theirs = torch.get_num_threads(), threading.Barrier(3)

    def compute(threads):
        compute_with(threads)
        all_have_set_theirs.wait(60)
        torch.ones(64, 64) @ torch.ones(64, 64)
        return torch.get_num_threads()

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(compute, (1, 2, 3))) == [1, 2, 3]
    assert torch.get_num_threads() == before


def logits(toy):
    """Returns those of an engine that computes in 8 bits, with adapters and tables."""
    Layout.of.cache_clear()  # a layout remembers which kernel takes it
    asker = Asker(toy.folder, dtype="int8")
    (rows,) = asker.wait(asker.ask("acme", [" ".join(WORDS[:20])]))
    asker.close()
    return rows.logits


@pytest.mark.parametrize("another", [False, True], ids=["missing", "of another version"])
@pytest.mark.parametrize("kernels", [of_tables, of_adapters, of_layers], ids=["plot", "adapters", "model"])
def test_a_kernel_that_cannot_be_used_is_named_in_the_log(toy, tmp_path, monkeypatch, caplog, kernels, another):
    """The kernels' own tests compare what both compute."""
    if kernels.kernel() is None:
        pytest.skip("hplm was installed without a C compiler, or this processor is of another kind")
    expected = logits(toy)
    library, other = next(Path(kernels.__file__).parent.glob("_kernel*.so")), tmp_path / "_kernel.so"
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "LIBRARY", other)
        if another:
            shutil.copy(library, other)
            patch.setattr(kernels, "VERSION", kernels.VERSION + 1)
        kernels.kernel.cache_clear()
        try:
            assert kernels.kernel() is None and str(other) in caplog.text
            assert np.allclose(logits(toy), expected, atol=1e-3, rtol=1e-3)
        finally:
            kernels.kernel.cache_clear()
