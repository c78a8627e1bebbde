"""WebShop (Yao et al., arXiv 2207.01206): an exact engine in plain Python, on official or generated data."""
