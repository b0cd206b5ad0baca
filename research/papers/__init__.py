"""The papers' own figures, simulated where their hardware is not here: curves of AlpaServe and TCB, HMI's timeline."""
