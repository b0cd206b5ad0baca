"""The arrival of a request: the front door says it in a header, and the model `hplm` in a parameter of forwarded requests."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from hmac import compare_digest

from hplm.errors import InvalidInput
from hplm.tenants.secret import SharedSecret

log = logging.getLogger(__name__)
HEADER = "hplm-arrived"  # microseconds since 1970; Triton adds it to the parameters, in the sender's upper and lower case
LONGEST_NS = 80 * 10**9  # the front door lets a request wait for 10 s, connects within 10 s, and lets its body take a minute
AHEAD_NS = 10**9  # by which the front door's clock may be ahead without a warning
_DIGITS = re.compile("[0-9]{1,18}")
FORWARDED = "hplm_forwarded"  # parameter and secret
ARRIVAL = "hplm_arrival_ns"  # parameter: of the monotonic clock


class Forwarding:
    """The parameters by which a model knows requests that the model `hplm` has forwarded, and when they arrived."""

    def __init__(self, server_pid: int) -> None:
        self._secret = SharedSecret(FORWARDED, server_pid).value.hex()

    def parameters(self, arrival_ns: int) -> dict[str, str | int]:
        return {FORWARDED: self._secret, ARRIVAL: arrival_ns}

    def is_in(self, parameters: Mapping[str, object]) -> bool:
        return FORWARDED in parameters and compare_digest(str(parameters[FORWARDED]).encode(), self._secret.encode())


class ArrivalClock:
    """Tells when requests arrived, in nanoseconds of the monotonic clock."""

    def __init__(
        self,
        forwarding: Forwarding,
        unix_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._forwarding = forwarding
        self._unix_ns = unix_ns
        self._monotonic_ns = monotonic_ns
        self._warned = False

    def arrival_ns(self, parameters: Mapping[str, object], received_ns: int) -> int:
        """`received_ns`: when this model got the request."""
        if self._forwarding.is_in(parameters):
            return min(int(str(parameters[ARRIVAL])), received_ns)
        return received_ns - self._waited_ns(parameters, received_ns)

    def _waited_ns(self, parameters: Mapping[str, object], received_ns: int) -> int:
        """Returns how long the request had waited at the front door when it was received.

        A client that sends the header itself only shortens its own time, because no time in the future counts.
        """
        said = [value for name, value in parameters.items() if name.lower() == HEADER]
        if not said:
            return 0
        value = said[0]
        if len(said) > 1 or not isinstance(value, str) or not _DIGITS.fullmatch(value):
            raise InvalidInput(f"the header {HEADER} is not one time in microseconds since 1970: leave it to the front door")
        since_ns = self._monotonic_ns() - received_ns  # it may have come with others, which were taken before it
        waited_ns = self._unix_ns() - since_ns - 1000 * int(value)
        if not -AHEAD_NS <= waited_ns <= LONGEST_NS:
            if not self._warned:
                log.warning(
                    "the header %s is %.0f s away from this machine's clock: what requests have waited in the front door does "
                    "not count; set the clocks of both machines, by NTP",
                    HEADER, abs(waited_ns) / 1e9,
                )  # fmt: skip
            self._warned = True
            return 0
        return max(waited_ns, 0)
