"""``linear_cross_entropy``: the loss of a vocabulary's logits, which are never in memory."""
