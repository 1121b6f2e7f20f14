"""How softmax(QK^T)V is computed."""
