"""Floor 0: records that cross stages, errors, provenance, process groups. Imports nothing above."""
