"""The tasks of tenants, and how their answers are read from logits."""
