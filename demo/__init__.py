"""`./run demo`. Its texts and labels are made from the docstrings of the installed Python packages."""
