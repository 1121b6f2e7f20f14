"""Predictions beside measurements of the same experiment, their order, and what calibrates the rates."""
