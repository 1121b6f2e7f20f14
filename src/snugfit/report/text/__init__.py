"""What every report is made of: tables, the terminal, files."""
