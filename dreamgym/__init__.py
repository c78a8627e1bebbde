"""DreamGym: agents learn by reinforcement learning inside an experience model (arXiv 2511.03773). See README.md for the map of this package."""
