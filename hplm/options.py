"""Names and defaults that the command line offers and other rooms check.

It imports nothing, so that `hplm --help` answers at once.
"""

TABLE_DTYPES = ("fp16", "bf16", "int8")  # of the vectors in a table
BANK_DTYPES = ("fp16", "bf16")  # of adapters and heads
LAYER_DTYPES = ("fp32", "bf16")  # precisions of layers
ENGINE_DTYPES = (*LAYER_DTYPES, "int8")  # precisions of the upper layers; int8: of their shared products, on CPUs
LEASE_SECONDS = 300.0  # how long a server that cannot see its registry answers for tenants with keys
MIN_TOKENS = 50_000  # of a corpus: look-ups would rarely hit the table of a smaller one
AUTO = "auto"
