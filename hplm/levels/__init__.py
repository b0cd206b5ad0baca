"""The confidence of answers: calibrations, the evidence that they rest on, and how they are fitted and judged."""
