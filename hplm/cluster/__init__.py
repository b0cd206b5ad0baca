"""Several servers as one: what they are, how requests reach them, and a whole cluster on this machine."""
