"""Fine-tunes a tenant on the tables of its domain, and scores it."""
