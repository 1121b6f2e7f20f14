"""Folders that each add a feature to the core, and that can be deleted."""
