"""The accuracy report: HMI's Table 3 on real text, number by number; a finished number is never computed again."""
