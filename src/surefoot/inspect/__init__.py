"""The reading side: what a run holds, whether it is whole, and what runs on this machine. Commands only print it."""
