"""Where the truth about tenants lies: objects that never change, and CURRENT, which names the newest snapshot."""
