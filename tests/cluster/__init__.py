"""Tests that run on a real Slurm cluster."""
