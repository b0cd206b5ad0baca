"""Imports tenants from saved adapters, and from checkpoints that were fine-tuned in full."""
