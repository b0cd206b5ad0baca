"""Publishes a meter's counts to the server process once a second, because each series costs a round trip."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Set
from typing import Any

from hplm.metrics.meter import Meter, Series
from hplm.metrics.names import COUNTER, Metric

log = logging.getLogger(__name__)
SECONDS = 1.0


class Publisher:
    """Publishes from a thread of its own. `family` is Triton's MetricFamily. `seconds`: between publications."""

    def __init__(self, family: Any, meter: Meter, backbone: str, seconds: float = SECONDS) -> None:
        self._family = family
        self._meter = meter
        self._backbone = backbone
        self._seconds = seconds
        self._families: dict[Metric, Any] = {}
        self._metrics: dict[Series, Any] = {}
        self._gauges: Set[Series] = frozenset()  # that were published last
        self._failures: dict[Series, str] = {}  # already logged, for the series that could not be published last time
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publishes the last counts and ends the thread."""
        self._ending.set()
        self._thread.join()
        # Triton would crash if the metrics were freed when the process ends: the memory through which it frees them is gone.
        for kept in (self._metrics, self._families):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    def _run(self) -> None:
        ending = False
        while not ending:
            ending = self._ending.wait(self._seconds)
            try:
                self._publish()
            except Exception:
                log.exception("cannot publish metrics")

    def _publish(self) -> None:
        counts, gauges = self._meter.take()
        self._meter.add_all({series: count for series, count in counts.items() if not self._send(series, count, "increment")})
        gauges = {series: value for series, value in gauges.items() if self._meter.keeps(series)}
        for series, value in gauges.items():
            self._send(series, value, "set")
        ended, self._gauges = self._gauges - gauges.keys(), gauges.keys()
        self._metrics = {
            series: metric for series, metric in self._metrics.items() if self._meter.keeps(series) and series not in ended
        }

    def _send(self, series: Series, value: float, how: str) -> bool:
        """Whether the series was published. One that Triton refuses must not keep the others from being published."""
        metric, labels = series
        try:
            getattr(self._metric(series), how)(value)
        except Exception as error:
            if str(error) != self._failures.get(series):
                self._failures[series] = str(error)
                log.error("cannot publish %s%s = %g: %s", metric.name, list(labels), value, error)
            return False
        self._failures.pop(series, None)
        return True

    def _metric(self, series: Series) -> Any:
        if series not in self._metrics:
            metric, values = series
            if metric not in self._families:
                kind = self._family.COUNTER if metric.kind == COUNTER else self._family.GAUGE
                self._families[metric] = self._family(name=metric.name, description=metric.description, kind=kind)
            labels = {"backbone": self._backbone, **dict(zip(metric.labels, values, strict=True))}
            self._metrics[series] = self._families[metric].Metric(labels=labels)
        return self._metrics[series]
