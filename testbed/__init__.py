"""Real Slurm clusters on one machine, and what watches and checks them. Never installed."""
