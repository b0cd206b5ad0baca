"""The number of threads that a thread's products are divided among."""

import threading

import torch

from hplm.model.openmp import apart, compute_with


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


def test_what_is_made_apart_is_made_in_a_thread_that_has_ended():
    made = apart(threading.current_thread)
    assert made is not threading.current_thread() and not made.is_alive()
