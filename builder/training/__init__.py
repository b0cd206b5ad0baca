"""Fine-tuning a tenant on the tables of its domain, and scoring it."""
