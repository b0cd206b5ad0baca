"""The confidence of answers."""
