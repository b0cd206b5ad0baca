"""Tenants: snapshots that readers follow, keys and quotas, tickets, the registry, and the manager that changes it."""
