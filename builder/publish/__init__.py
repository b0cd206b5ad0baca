"""From a store to what Triton serves: model folders, and changes of a live state."""
