"""Other ways to survive an eviction, under the same events: scripts as people write them, under plain torchrun."""
