"""Bytes and seconds of steps on several GPUs."""
