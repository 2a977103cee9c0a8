"""Recipes: each file is one `Trainer` subclass with its model, its data and its default config."""
