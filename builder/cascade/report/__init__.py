"""The report of cascades: plans beside simpler ways of answering, on texts that have chosen nothing (Tabi, section 7)."""
