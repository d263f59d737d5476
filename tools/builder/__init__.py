"""The parts of build_variant.py."""
