"""The engine: local queue, renewal, cancellation and the contract with backends; it knows no server."""
