"""Predictions of text generation: bytes and seconds of `generate` (README.md)."""
