"""A gateway with the interfaces of OpenAI and others in front of the tenants that a Triton serves.

`python -m hplm_openai --url HOST:8001` runs it alone; `hplm serve --openai-port PORT` runs it beside its server.
"""
