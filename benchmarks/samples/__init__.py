"""Samples: calls drawn at random from what models do, which nothing is tuned for."""
