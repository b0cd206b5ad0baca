"""Checks an installation: what may stop a server, or let somebody in."""
