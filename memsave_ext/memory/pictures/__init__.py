"""Draws memory with matplotlib, which only the files of this folder import."""
