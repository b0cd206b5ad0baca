"""How everything learns: one loop, its limits, and the two ways in which lower layers learn a corpus."""
