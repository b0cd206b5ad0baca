"""The `hplm` command: one thin file a group of commands, no logic."""
