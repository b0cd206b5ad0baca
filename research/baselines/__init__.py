"""BASELINES: whole models, one a tenant, as they are served today. What hPLMs are compared with, on the same server."""
