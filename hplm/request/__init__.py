"""The bytes of requests and answers, as they travel between lookup, upper and the engine."""
