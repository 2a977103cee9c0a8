"""Elastic training for Flax models on multi-controller JAX."""
