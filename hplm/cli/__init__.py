"""The `hplm` command: a file for each group of commands, which reads options and prints results, without logic."""
