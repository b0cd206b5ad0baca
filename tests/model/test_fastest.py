"""`auto` computes in the format that is faster on this machine. It is measured once, for serving and for training."""

import json
import logging
from itertools import cycle

import pytest
import torch

from builder.learning.loop import half_precision
from hplm.doctor import checks
from hplm.engine.engine import resolve_precision
from hplm.model import fastest as module
from hplm.model.fastest import SERVING, TRAINING, fastest, measured

CPU = torch.device("cpu")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with instructions for bf16, on which nothing was measured yet."""

    class Machine:
        file, measurements = tmp_path / "fastest.json", []

        def has(self, speed):
            """Gives bf16 this speed, for a new process."""
            monkeypatch.setattr(module, "measured", lambda work: (self.measurements.append(work), speed)[1])
            self.restart()

        def restart(self):
            fastest.cache_clear()
            module._machine.cache_clear()

    monkeypatch.setattr(module, "FILE", Machine.file)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    machine = Machine()
    yield machine
    machine.restart()


@pytest.mark.parametrize(("speed", "name"), [(0.6, "fp32"), (1.01, "fp32"), (1.05, "bf16"), (3.0, "bf16")])
def test_serving_and_training_take_the_faster_format(machine, speed, name):
    machine.has(speed)
    assert resolve_precision("auto", CPU).name == name
    assert half_precision(CPU)._enabled == (name == "bf16")
    assert sorted(machine.measurements) == [SERVING, TRAINING] and f"{speed:.2f} x" in checks.number_format().says


def test_it_is_measured_once_for_each_machine(machine, monkeypatch):
    machine.has(2.0)
    assert fastest() is fastest() and machine.measurements == [SERVING]
    machine.has(0.5)  # a restart finds what was kept, also if it would now measure something else
    assert fastest().dtype is torch.bfloat16 and machine.measurements == [SERVING]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")  # another machine, for oneDNN
    machine.restart()
    assert fastest().dtype is torch.float32 and machine.measurements == [SERVING] * 2
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    machine.restart()
    assert fastest().dtype is torch.bfloat16 and len(json.loads(machine.file.read_text())) == 2


def test_processes_that_measure_at_once_take_the_same_format(machine, monkeypatch):
    def measured(work):
        machine.has(2.0)
        assert fastest().dtype is torch.bfloat16  # another process, which is done first
        fastest.cache_clear()
        return 0.9

    monkeypatch.setattr(module, "measured", measured)
    assert fastest().dtype is torch.bfloat16 and [*json.loads(machine.file.read_text()).values()] == [2.0]


@pytest.mark.parametrize("content", ["", "[]", '{"x": 1', '{"x": "y"}'])
def test_a_broken_file_is_written_anew(machine, content):
    machine.file.write_text(content)
    machine.has(2.0)
    assert fastest().dtype is torch.bfloat16 and [*json.loads(machine.file.read_text()).values()] == [2.0]


def test_where_nothing_can_be_written_each_process_measures_and_says_so(machine, monkeypatch, caplog):
    monkeypatch.setattr(module, "FILE", machine.file / "below")
    machine.file.touch()
    machine.has(2.0)
    with caplog.at_level(logging.WARNING):
        assert fastest().dtype is torch.bfloat16
    assert "below" in caplog.text
    machine.restart()
    assert fastest().dtype is torch.bfloat16 and machine.measurements == [SERVING] * 2


def test_without_instructions_for_bf16_nothing_is_measured(machine, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    machine.has(2.0)
    assert fastest().dtype is torch.float32 and not machine.measurements
    assert not machine.file.exists()


@pytest.mark.parametrize("work", [SERVING, TRAINING])
def test_a_layer_is_measured_in_both_formats(work, monkeypatch):
    """Its best times count. Other threads and the number of threads stay as they are."""
    times = cycle([9.0, 5.0, 3.0, 1.0, 4.0, 2.0])  # fp32 and bf16 in turn: the first ones warm up
    run, before = module._seconds, torch.get_num_threads()
    monkeypatch.setattr(module, "_seconds", lambda own: (run(own), next(times))[1])
    assert measured(work) == 3.0 and torch.get_num_threads() == before
