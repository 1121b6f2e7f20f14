"""Parts that all reports share: tables, the terminal, files."""
