"""WebShop (Yao et al., arXiv 2207.01206): an exact engine in plain Python, on official or generated data.

env.py (the environment), text.py (states), scripted.py (players), relabel.py (traces, counterfactuals),
audit.py (truth for reports), prompts.py; behind them engine.py, catalogue.py, toy_catalogue.py, reward.py,
bm25.py.
"""
