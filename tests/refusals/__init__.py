"""Bad input: what is refused, by which sentence, on every way in. The tables of the documents say what is allowed."""
