"""The scales among which compensated codes choose, as multiples of the searched one."""

# Compensation moves weights, so that the scale that is best for a row is another than that of the
# search (docs/calibration.md has what this gains). The first of equally good ones is taken.
MULTIPLES = (1.0, 0.85, 0.92, 1.08, 1.15)
