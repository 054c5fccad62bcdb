"""What a save costs the training, as ratios within one run: `surefoot bench save`."""
