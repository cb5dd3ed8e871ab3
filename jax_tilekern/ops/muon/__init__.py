"""The optimizer Muon, and the iterations that orthogonalise its updates."""
