"""Levels of tenants on shallower stacks, and the plans that join them."""
