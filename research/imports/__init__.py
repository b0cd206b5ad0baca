"""Checkpoints that plain `transformers` fine-tuned in full, as tenants: how near they come, what helps, and the way back."""
