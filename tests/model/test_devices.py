"""Errors of a device after which its process computes nothing any more, and the threads of a thread's products."""

import threading

import pytest
import torch

from hplm.errors import Broken
from hplm.model import faults
from hplm.model.openmp import compute_with

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
    numbers, all_have_set_theirs = {}, threading.Barrier(3)

    def compute(threads):
        compute_with(threads)
        all_have_set_theirs.wait(60)
        torch.ones(64, 64) @ torch.ones(64, 64)
        numbers[threads] = torch.get_num_threads()

    before = torch.get_num_threads()
    threads = [threading.Thread(target=compute, args=(count,)) for count in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert numbers == {1: 1, 2: 2, 3: 3}
    assert torch.get_num_threads() == before
