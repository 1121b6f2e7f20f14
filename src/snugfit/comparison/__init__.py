"""Foreseen beside seen."""
