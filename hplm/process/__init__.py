"""The process around an engine: who passes requests on to it, what they say to each other, its threads, and its end."""
