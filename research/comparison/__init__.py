"""Load on every scheme, with few tenants and many: throughput, latency and memory side by side."""
