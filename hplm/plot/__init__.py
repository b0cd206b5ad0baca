"""DOMAIN knowledge: precomputed lookup tables from n-grams to the lower stack's output (HMI 3.2.1)."""
