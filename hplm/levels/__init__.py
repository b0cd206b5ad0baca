"""The confidence of answers: calibrations, and the evidence that they rest on."""
