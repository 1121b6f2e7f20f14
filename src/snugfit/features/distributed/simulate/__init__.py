"""Simulation of DeepSpeed's and torch's distributed code on tensors without data."""
