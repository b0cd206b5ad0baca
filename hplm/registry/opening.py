"""Opens the store of a registry at its place."""

from __future__ import annotations

import time
from pathlib import Path

from hplm.clock import Clock
from hplm.errors import InvalidInput
from hplm.place import Place
from hplm.registry.folder import Folder
from hplm.registry.store import Store


def opened(place: Place, clock: Clock = time) -> Store:
    if isinstance(place, Path):
        return Folder(place, clock)
    try:
        from hplm.registry.bucket import Bucket
    except ImportError:
        raise InvalidInput(f"{place} needs the package obstore: install it with `pip install 'hplm[bucket]'`") from None
    return Bucket(place)
