"""The baselines: a whole model for each tenant, as models are served today. hPLMs are compared with them on the same server."""
