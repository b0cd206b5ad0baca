"""From a resolved request to its answer: packing, staging, running a batch; and the slow reference of the same."""
