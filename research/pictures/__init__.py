"""The pictures of the docs: two diagrams, and charts of stored figures."""
