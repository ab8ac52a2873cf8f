"""Pieces that several operations share; nothing here chooses an implementation."""
