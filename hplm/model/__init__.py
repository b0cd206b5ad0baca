"""General knowledge: the lower stack on n-gram windows, the upper stack on packed texts, and loading a checkpoint."""
