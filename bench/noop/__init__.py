"""Two models that do nothing, for `hplm bench glue`. Triton runs them, so they import only its utilities."""
