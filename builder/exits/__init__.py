"""Exits of a tenant: heads between the upper layers, and when texts leave there."""
