"""Tenants from adapters that other libraries trained: `peft` and AdapterHub's `adapters`."""
