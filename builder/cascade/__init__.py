"""Levels of tenants on shallower stacks, and the plans that join them: easy texts cost a fraction of the layers (Tabi)."""
