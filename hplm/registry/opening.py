"""Opens the store of a registry at its location."""

from __future__ import annotations

import time
from pathlib import Path

from hplm.clock import Clock
from hplm.errors import InvalidInput
from hplm.location import Location
from hplm.registry.folder import Folder
from hplm.registry.store import ObjectStore


def opened(location: Location, clock: Clock = time) -> ObjectStore:
    if isinstance(location, Path):
        return Folder(location, clock)
    try:
        from hplm.registry.bucket import Bucket
    except ImportError:
        raise InvalidInput(f"{location} needs the package obstore: install it with `pip install 'hplm[bucket]'`") from None
    return Bucket(location)
