"""Task knowledge: records of adapters and heads on disk, slots on the device, and their batched application."""
