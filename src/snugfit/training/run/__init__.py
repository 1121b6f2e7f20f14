"""One run: its session, its steps, and what happens between them."""
