"""What waits and what goes next. Pure: what waits and the time in, a choice out; no Triton anywhere."""
