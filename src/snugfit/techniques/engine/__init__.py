"""Whether the model's layers run as they are written, or compiled."""
