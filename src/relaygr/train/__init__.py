"""Data sets, training and evaluation."""
