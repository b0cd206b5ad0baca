"""Domain knowledge: precomputed tables from n-grams to the lower stack's output (HMI 3.2.1)."""
