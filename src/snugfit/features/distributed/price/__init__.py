"""Prediction of the bytes and seconds of collectives, pipeline stages and CUDA streams on several GPUs."""
