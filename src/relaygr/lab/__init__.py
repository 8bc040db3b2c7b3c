"""Experiments: what the relay does, shown and measured."""
