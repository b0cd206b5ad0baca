"""Errors of an accelerator after which its process computes nothing any more. The sentences are those of CUDA and torch."""

import pytest
import torch

from hplm.errors import Broken
from hplm.model import faults


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ..."),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: unspecified launch failure"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"),
        RuntimeError("HIP error: an illegal memory access was encountered"),
    ],
)
def test_a_fault_stays(error):
    assert faults.stays(error) and not faults.is_out_of_memory(error)


WITHOUT_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to ..."),
]


@pytest.mark.parametrize("error", WITHOUT_MEMORY)
def test_a_device_without_memory_is_known(error):
    assert faults.is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        *WITHOUT_MEMORY,
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
        Broken("CUDA error: told by somebody else"),
        ValueError("CUDA error: "),
    ],
)
def test_other_errors_pass(error):
    assert not faults.stays(error)
