"""The confidence of answers, and what a cascade does with it: plans, dispatch, pruning and ensembles."""
