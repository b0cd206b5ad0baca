"""Products are divided among threads, torch computes where a kernel cannot, and a device that fails is told."""

import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from hplm import compiled
from hplm.errors import Broken, OutOfCapacity
from hplm.model import faults
from hplm.model.cpu import compute_with
from testing.toy import WORDS
from tests.engine.asker import Asker
from tests.support.needed import needs_kernel

LOST, FULL, OTHER = (True, False), (False, True), (False, False)


@pytest.mark.parametrize(
    "error, expected",
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ..."), LOST),
        (RuntimeError("CUDA error: device-side assert triggered"), LOST),
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
def test_a_fault_that_stays_is_told_from_a_full_device_and_from_other_errors(error, expected, monkeypatch):
    # As while another thread records kernels.
    monkeypatch.setattr(torch.cuda, "empty_cache", Mock(side_effect=RuntimeError("captures_underway.empty()")))
    assert (faults.stays(error), faults.is_out_of_memory(error)) == expected
    assert isinstance(faults.failure("computing", error), OutOfCapacity) == (expected is FULL)


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
    asker = Asker(toy.folder, device="cpu", dtype="int8")
    (rows,) = asker.wait(asker.ask("acme", [" ".join(WORDS[:20])]))
    asker.close()
    return rows.logits


@needs_kernel()
def test_torch_computes_where_kernels_are_missing_and_the_log_names_them(toy, tmp_path, monkeypatch, caplog):
    """The kernels' own tests compare what both compute."""
    expected = logits(toy)
    with monkeypatch.context() as patch:
        compiled.kernel.cache_clear()
        patch.setattr(compiled, "VERSION", compiled.VERSION + 1)
        assert compiled.kernel() is None and str(compiled.LIBRARY) in caplog.text
        compiled.kernel.cache_clear()
        patch.setattr(compiled, "LIBRARY", tmp_path / "missing")
        try:
            found = logits(toy)
        finally:
            compiled.kernel.cache_clear()
    assert caplog.text.count(str(tmp_path / "missing")) == 1
    assert np.allclose(found, expected, atol=1e-3, rtol=1e-3)
