"""Tenants: snapshots that readers follow, keys and quotas, tickets, the live state, and the manager that changes it."""
