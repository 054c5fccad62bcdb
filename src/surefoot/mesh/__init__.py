"""The mesh of a run's node agents: authenticated connections that carry notices, liveness, inventories and decisions.

Small messages only; bytes in bulk have connections of their own. No torch in here, and no knowledge of what the
messages mean.
"""
