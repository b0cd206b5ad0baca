"""Several servers as one: their description, the HAProxy that routes requests to them, and all of it on one machine."""
