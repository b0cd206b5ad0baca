"""`hplm bench`: figures of this machine, each with its baseline in the same run. One file a benchmark."""
