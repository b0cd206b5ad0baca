"""The end of Triton's log is read."""

import logging

from hplm.server import log

NOISE = """\
W1120 09:17:40.762443 10626 pinned_memory_manager.cc:273] "Unable to allocate pinned system memory"
E1120 09:17:40.762572 10626 server.cc:241] "CudaDriverHelper has not been initialized."
I1120 09:17:40.763463 10626 model_lifecycle.cc:472] "loading: bad:1"
+-------+
| Model |
+-------+

Error: Failed to initialize NVML
"""
FAILED_MODEL = r"""
I1120 09:17:42.165667 10626 pb_stub.cc:366] "Failed to initialize Python stub: ValueError: cut\n\nAt:\n  m.py(3)"
E1120 09:17:42.388123 10626 backend_model.cc:692] "ERROR: Failed to create instance: ValueError: cut\n\nAt:\n  m.py(3)"
E1120 09:17:42.388253 10626 lifecycle.cc:642] "failed to load 'bad' version 1: Internal: ValueError: cut\n\nAt:\n  m.py(3)"
error: creating server: Internal - failed to load all models
"""


def test_the_error_of_a_failing_model_is_shown_once_and_readable():
    assert log.complaints(NOISE + FAILED_MODEL) == [
        "failed to load 'bad' version 1: Internal: ValueError: cut",
        "At:",
        "  m.py(3)",
    ]
    parser = "[libprotobuf ERROR text_format.cc:337] Error parsing text-format inference.ModelConfig: 2:1: Expected identifier"
    assert log.complaints(f"{NOISE}{parser}\n") == [parser]


def test_lines_of_our_processes_have_the_form_of_tritons():
    record = logging.LogRecord("hplm.process.client", logging.ERROR, "client.py", 7, "cut", (), None)
    record.created, record.msecs, record.process = 1763630262.388, 388.0, 10626
    line = log.formatter().format(record)
    assert line == "E1120 09:17:42.388000 10626 hplm.process.client:7] cut"
    assert log.complaints(f"{NOISE}{line}\n") == ["cut"]


def test_without_an_error_line_the_last_lines_are_shown():
    said = log.complaints(NOISE + "Signal (11) received.\n")
    assert said[-1] == "Signal (11) received."
    assert not any(line.startswith(("|", "+")) for line in said)
