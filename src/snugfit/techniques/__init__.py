"""One file per technique; the folder is its slot. Everyone asks the roster; nobody imports one by name."""
