"""Simulates the serving scheduler on a virtual clock, with random or recorded arrivals and an engine model."""
