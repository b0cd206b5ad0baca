"""The type of numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]  # of any shape and number type; comments say which
