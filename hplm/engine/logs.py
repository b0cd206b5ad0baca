"""The log of a model's process or of an engine: it has Triton's form, because all write into one file."""

from __future__ import annotations

import faulthandler
import logging
import signal
import time

_LINE = "%(levelname).1s%(asctime)s.%(msecs)03d000 %(process)d %(name)s:%(lineno)d] %(message)s"


def formatter() -> logging.Formatter:
    made = logging.Formatter(_LINE, "%m%d %H:%M:%S")
    made.converter = time.gmtime  # as Triton does
    return made


def begin_log() -> None:
    """Writes the log to the standard error, and where the threads stand when `hplm.server.stacks` asks with SIGUSR1."""
    handler = logging.StreamHandler()
    handler.setFormatter(formatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    faulthandler.register(signal.SIGUSR1)
