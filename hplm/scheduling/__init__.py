"""The queue, the policies, admission and the cost model. Nothing here knows Triton."""
