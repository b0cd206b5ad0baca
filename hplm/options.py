"""What the command line offers and other rooms check: names and defaults.

It imports nothing, so that `hplm --help` answers at once.
"""

TABLE_DTYPES = ("fp16", "bf16", "int8")  # of the vectors in a table
BANK_DTYPES = ("fp16", "bf16")  # of adapters and heads
ENGINE_DTYPES = ("fp32", "bf16")  # that the upper layers are computed in
MIN_TOKENS = 50_000  # of a corpus: a domain made from fewer would rarely be hit
