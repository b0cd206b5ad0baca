"""What a request of an encoder meets first: the views of what is served, and lookup, which turns its texts into addresses."""
