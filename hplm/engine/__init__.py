"""From a looked-up request to its answer: an opened backbone, lookup, staging, the engine, the pipeline."""
