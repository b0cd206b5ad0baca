"""The schemes that hPLMs are compared with (HMI, 7.2), exported from the same store and tenants."""
