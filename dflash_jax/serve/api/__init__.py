"""The server's endpoints, one module for each family."""
