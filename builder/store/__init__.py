"""The store of all that is built before it is exported, and files that survive an interruption."""
