"""The command `aiolock run`."""
