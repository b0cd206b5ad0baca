"""The accuracy report: HMI's Table 3 on real text, number by number, from small result files that are never computed twice."""
