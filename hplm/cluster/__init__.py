"""Several servers as one: their description, and the file of the HAProxy before them, a router or a front door."""
