"""Torture of real processes on one pool, and an independent reader of the pool's files."""
