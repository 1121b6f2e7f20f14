"""JSON Schema of the documents that commands print with `--json`."""
