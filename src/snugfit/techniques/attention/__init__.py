"""Techniques of the slot `attention` (a choice of the recipe): the implementation of softmax(QK^T)V."""
