"""Environments: the contract (base.py), recorded episodes alone (logs.py), a folder for each built-in one."""
