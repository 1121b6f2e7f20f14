"""Folders that each add something to the core, and can be deleted."""
