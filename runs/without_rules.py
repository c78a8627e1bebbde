"""Environments without their rules for reasoning and counterfactual rewards: what any other one gets.

    python train_policy.py --env runs.without_rules:Homes --config configs/tiny/alfworld.json --out out/homes
"""
from dreamgym.envs.alfworld.env import ALFWorld
from dreamgym.envs.base import Environment
from dreamgym.envs.webarena.env import WebArena


class Homes(ALFWorld):
    explain = Environment.explain
    counterfactuals = Environment.counterfactuals


class Sites(WebArena):
    explain = Environment.explain
    counterfactuals = Environment.counterfactuals
