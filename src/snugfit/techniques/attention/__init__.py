"""The slot `attention`: the implementation of softmax(QK^T)V."""
