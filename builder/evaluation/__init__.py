"""Scores a tenant, computed here and as a server answers."""
