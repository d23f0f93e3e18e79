"""Bridges to other libraries' models and checkpoints. Nothing here is imported by fuseops itself."""
