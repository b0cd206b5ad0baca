"""hPLM: thousands of fine-tuned text models behind one Triton, each costing megabytes."""

__version__ = "0.1.0"
