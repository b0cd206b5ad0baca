"""Imports tenants from adapters that `peft` or AdapterHub's `adapters` saved."""
