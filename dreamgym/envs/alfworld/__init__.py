"""ALFWorld: household tasks in text, played by the real TextWorld engine on official or generated games."""
