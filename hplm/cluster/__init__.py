"""Several machines: the description of a cluster, and the HAProxy that routes requests to its replicas."""
