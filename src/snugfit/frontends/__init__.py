"""Three ways into training: our own loop, a live Trainer, and a custom loop."""
