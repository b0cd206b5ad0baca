"""Adapts the halves of a split BERT to n-gram windows: distillation from the original, masked words."""
