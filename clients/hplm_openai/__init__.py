"""A gateway with OpenAI's interface in front of the decoders that a Triton serves: models, completions and chat.

`python -m hplm_openai --url HOST:8001` runs it alone; `hplm serve --openai-port PORT` runs it beside its server.
"""
