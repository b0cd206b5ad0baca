"""Students of a tenant: shallow members, of which each learns what those before it have not."""
