"""Who exists: tenants, the snapshots readers see them in, and the signed ticket between the two backends."""
