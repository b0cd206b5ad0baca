"""What a tenant scores, computed here and as served, beside other ways of making a model for the same task."""
