"""Blocks and layers of autoencoders."""
