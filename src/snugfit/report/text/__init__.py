"""Parts of all reports: tables, the terminal, files."""
