"""Bringing a split BERT's halves to their new work: distillation from the original, on n-gram windows."""
