"""Generation: sequences of many tenants grow together, a token a step, and answers are said while they grow."""
