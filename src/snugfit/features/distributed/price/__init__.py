"""Prediction of the bytes and seconds of exchanges, stages and streams on several GPUs."""
