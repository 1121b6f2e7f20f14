"""The execution of the model's layers: uncompiled or compiled."""
