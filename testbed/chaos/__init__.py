"""SIGKILL at any instant: nodes of simulated GPUs, the real agent, a tiny commander, and a judge of what was left.

No Slurm runs here: job files are written as the prolog would, plans sent as the controller would, and the agent is
started again as systemd would (Restart=always). ``python -m bench.chaos`` does 2,000 kills, tests/test_chaos.py 100.
"""
