"""What tests, benchmarks and research share, and the product never imports: the slow reference, random stores, a toy."""
