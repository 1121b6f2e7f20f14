"""The slot `engine`: the execution of the model's layers, uncompiled or compiled."""
