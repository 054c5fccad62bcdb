"""Connects a run's node agents: authenticated connections carry notices, liveness, inventories, decisions and images.

Bytes of images travel as answers to questions, piece by piece; long messages leave room for short ones between their
parts (`outbox.py`). No torch in here, and no knowledge of the messages' meaning.
"""
