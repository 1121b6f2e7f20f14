"""The computation of softmax(QK^T)V."""
