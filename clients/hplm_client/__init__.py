"""A typed client for hPLMs."""
