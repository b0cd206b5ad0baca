"""The figures that the overload benchmark computes from a report."""

from collections import Counter

import numpy as np

from bench.measuring.overload import REFUSED, Computed, Offered, figures, simulate
from bench.overload import OverloadBench
from loadtest.report import Report


def test_refused_late_and_timely_answers_are_counted_separately():
    said = f"[deadline] {REFUSED} 900 ms".encode()
    #           in time, late, refused at once, dropped later
    bodies = [b"fine", b"fine", said, b"[deadline] not started within the 100 ms"]
    report = Report(
        wall_s=2.0,
        cpu_s=0.1,
        numbers=np.array([0, 2, 1, 3]),
        statuses=np.array([200, 200, 503, 503]),
        latencies=np.array([0.4, 0.3, 0.005, 0.2]),
        lag_s=0.0,
        errors=Counter(timeout=1),
        bodies=bodies,
    )
    offered = Offered(np.array([0.0, 0.5, 1.0, 1.5, 2.0]), np.array([0.5, 0.5, 0.2, 0.2, 0.2]))
    found = figures(report, offered, capacity=1.0, case=OverloadBench(batch_texts=4), by_server=3)
    assert (found["refused"], found["dropped_later"], found["late"], found["unanswered"]) == (1, 1, 1, 1)
    assert found["on_time_of_admitted"] == 0.25  # of four: the one without an answer counts against the server
    assert found["goodput_of_capacity"] == 0.5
    assert found["on_time_of_offered"] == 0.2
    assert (found["on_time"], found["on_time_by_server"], found["server_counts_more"]) == (1, 3, 2.0)
    assert found["refusal_p99_ms"] == 5.0
    assert found["batch_ms"] == 4000.0
    assert found["offered_req_per_s"] == 2.5


def test_the_simulated_server_does_what_its_batches_allow():
    """A batch of ten texts takes a second. At three times that rate a third is answered, at half of it everything."""
    batches = [Computed.of({"tokens": 100, "stages": {"prepare": [0.0, 0.001], "compute": [1.0, 2.0]}})] * 40
    case = OverloadBench(tokens=10, batch_texts=10)

    def answered(rate):
        count = round(60 * rate)
        offered = Offered(np.arange(count) / rate, np.full(count, 6.0))
        return simulate(offered, batches, case, "timely")

    assert answered(5.0) == 1.0
    assert 0.3 < answered(30.0) < 0.45  # texts that wait at the end are answered, too
