"""The bite list: faults that tests must find. See README.md."""
