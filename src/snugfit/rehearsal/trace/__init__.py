"""What a rehearsal wrote, and how traces are repeated, joined and deepened."""
