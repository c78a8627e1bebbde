"""The environments without their rules for reasoning and counterfactual rewards: what any other one gets.

    python train_policy.py --env runs.without_rules:Shop --config configs/tiny/webshop.json --out out/shop
"""
from dreamgym.envs.alfworld.env import ALFWorld
from dreamgym.envs.base import Environment
from dreamgym.envs.webarena.env import WebArena
from dreamgym.envs.webshop.env import WebShop


class Shop(WebShop):
    explain = Environment.explain
    counterfactuals = Environment.counterfactuals


class Homes(ALFWorld):
    explain = Environment.explain
    counterfactuals = Environment.counterfactuals


class Sites(WebArena):
    explain = Environment.explain
    counterfactuals = Environment.counterfactuals
