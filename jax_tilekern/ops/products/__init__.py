"""Matrix products: dense, grouped, scaled, with epilogues, and overlapped with collectives."""
