"""By when an answer must be there: a bound on the whole, on its first token, and on every token after that."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Promise:
    """Nanoseconds from the request's arrival, or between two tokens. 0: no bound."""

    whole_ns: int = 0
    first_token_ns: int = 0
    token_ns: int = 0

    def or_else(self, other: Promise) -> Promise:
        """Returns these bounds, and the other's where this one has none: a request's come before its tenant's."""
        return Promise(
            self.whole_ns or other.whole_ns, self.first_token_ns or other.first_token_ns, self.token_ns or other.token_ns
        )


NO_PROMISE = Promise()
