"""Lookup turns the texts of a request into addresses. Views are the tenants and tables that it reads."""
