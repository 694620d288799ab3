"""Stores and looks up which plans were verified for a script, and verifies them before a run."""
