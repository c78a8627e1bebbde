"""The shop without its rules for reasoning and counterfactual rewards: what any other environment gets.

    python train_policy.py --env runs/shop_without_rules.py --config configs/tiny/webshop.json
"""
from dreamgym.envs.base import Environment
from dreamgym.envs.webshop.env import WebShop


class Shop(WebShop):
    explain = Environment.explain
    counterfactuals = Environment.counterfactuals
