"""Placement: which tenants of which backbones go on which devices, cut how. Pure: no clock, no thread, no torch."""
