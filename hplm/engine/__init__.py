"""From a looked-up request to its answer: an opened backbone, staging, the layers, exits, and the encoder that is stepped."""
