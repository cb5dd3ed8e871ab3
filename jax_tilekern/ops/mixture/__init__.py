"""Mixtures of experts: routing, the layer, and rows in the order of experts."""
