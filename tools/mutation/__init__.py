"""The parts of mutation_score.py."""
