"""Measurements, as ratios within one run: `surefoot bench`."""
