"""Levels of tenants on shallower stacks: easy texts cost a fraction of the layers (Tabi)."""
