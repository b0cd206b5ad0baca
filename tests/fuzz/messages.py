"""Bad messages between the processes of a server. Reading them fails with an error, or leaves out what is not whole."""

from __future__ import annotations

import socket
import struct

from hypothesis import strategies as st

from hplm.engine.channel import Asks, Channel, Replies
from hplm.errors import NoTenant
from hplm.tenants.ticket import Ticket
from tests.fuzz.mutations import mutated
from tests.fuzz.target import Found, Target


class Tickets(Target):
    """Tickets that this server has not signed."""

    weight = 5

    def __init__(self, folder):
        self.secret = b"s" * 32
        self.good = Ticket(2**63, 3, 4, 5, 6, 7, -8, 9).sign(self.secret, b"found" * 40)

    def cases(self):
        return mutated(self.good).filter(lambda data: data != self.good)

    def check(self, case):
        try:
            Ticket.check(case, [self.secret])
        except NoTenant:
            return
        raise Found("a forged ticket is valid")


class Messages(Target):
    """A channel whose other end was killed in the middle of a message, and which cuts messages anywhere."""

    weight = 3

    def __init__(self, folder):
        self.sent = [Asks([]), Replies([])]

    def cases(self):
        return st.tuples(st.integers(0, 200), st.lists(st.integers(1, 40), max_size=6))

    def check(self, case):
        end, pieces = case
        mine, other = socket.socketpair()
        try:
            sender = Channel(mine.detach())
            for message in self.sent:
                sender.send(message)
            sender.close()
            stream = other.recv(1 << 16)
            near, far = socket.socketpair()
            receiver = Channel(near.detach())
            left = stream[:end]
            for size in pieces:
                far.sendall(left[:size])
                left = left[size:]
            far.sendall(left)
            far.close()
            got = []
            while (message := receiver.receive()) is not None:
                got.append(message)
            receiver.close()
        finally:
            other.close()
        whole, ends = 0, 0
        for _ in self.sent:
            ends += 8 + struct.unpack_from("<Q", stream, ends)[0]
            whole += ends <= end
        if got != self.sent[:whole]:
            raise Found(f"{got} of the first {end} of {len(stream)} bytes")


TARGETS = {
    "ticket": Tickets,
    "channel": Messages,
}
