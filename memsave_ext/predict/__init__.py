"""Predicts how many bytes a model and its optimizer will need, before they are allocated."""
