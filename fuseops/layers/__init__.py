"""Layers: Sequentials that the package composes itself."""

from .moe import MoE as MoE
