"""One file per technique; the folder is its slot. The roster lists them; no code imports one by name."""
