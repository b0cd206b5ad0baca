"""Keeps a local copy of a live state that another machine serves over HTTP."""
