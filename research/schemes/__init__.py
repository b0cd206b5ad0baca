"""Exports and trains the schemes that hPLMs are compared with (HMI, 7.2), from the same store and tenants."""
