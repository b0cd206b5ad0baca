"""Compares all schemes under load, with few and with many tenants: throughput, latency and memory."""
