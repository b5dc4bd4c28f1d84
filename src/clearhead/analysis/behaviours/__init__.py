"""Which known behaviours a unit shows: detectors with thresholds fixed on planted cases."""
