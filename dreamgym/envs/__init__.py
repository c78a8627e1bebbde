"""Environments: the contract (base.py), recorded episodes alone (logs.py), and one folder for each built-in environment."""
