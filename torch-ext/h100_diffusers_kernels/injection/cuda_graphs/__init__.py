"""A module's forward, captured into a CUDA graph for each signature of its arguments and replayed.

``forward`` decides when; ``watched`` tells whether what was captured still holds; ``arguments`` and
``settings`` say what a call is told apart by; ``capture`` runs a call into a graph and replays it;
``memory`` tells whether what it reads is where it was; ``device`` is CUDA's part of all that.
"""
