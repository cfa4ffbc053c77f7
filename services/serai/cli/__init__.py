"""The `serai` command: parses, then calls. The only room that sees all services."""
