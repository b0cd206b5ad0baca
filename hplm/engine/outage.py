"""How long an engine has not worked, and when nobody should wait for it any longer."""

from __future__ import annotations

from dataclasses import dataclass, replace

PATIENCE_SECONDS = 120.0  # an outage that lasts longer does not end by itself
STEADY_SECONDS = 60.0  # an engine that has worked for so long has ended the outage


@dataclass(frozen=True)
class Outage:
    """The time since an engine last worked steadily. An engine that works for a moment after each start does not end it."""

    patience: float
    began: float
    works_since: float | None  # None: no engine works

    @classmethod
    def of_first(cls, began: float, works_since: float) -> Outage:
        """Of the first engine: the time that it took to load its model. A later one may take twice as long."""
        return cls(max(PATIENCE_SECONDS, 2 * (works_since - began)), works_since, works_since)

    def ended(self, now: float) -> Outage:
        return replace(self, began=now if self._is_over(now) else self.began, works_since=None)

    def started(self, now: float) -> Outage:
        return replace(self, works_since=now)

    def is_given_up(self, now: float) -> bool:
        """Whether only a restart of the server may still help."""
        until = now if self.works_since is None else self.works_since
        return not self._is_over(now) and until - self.began > self.patience

    def _is_over(self, now: float) -> bool:
        return self.works_since is not None and now - self.works_since > STEADY_SECONDS
